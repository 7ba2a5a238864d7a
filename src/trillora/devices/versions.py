"""Versions of installed packages, and the versions that packages require of each other. No jax.

For example, with jax 0.10.2:

    pinned_version("jax", "libtpu")        ->  "==0.0.42.*"
    matches_pin("0.0.42.1", "==0.0.42.*")  ->  True
"""

from __future__ import annotations

import importlib.metadata
import re

from packaging.requirements import Requirement


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def pinned_version(owner: str, package: str) -> str | None:
    """The exact version of `package` that the installed `owner` requires; None if it requires no exact version."""
    try:
        requirements = importlib.metadata.requires(owner) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    pins = (re.match(rf"{re.escape(package)}\s*\(?(==[\w.*]+)", line) for line in requirements)
    return next((pin[1] for pin in pins if pin), None)


def matches_pin(version: str, pin: str) -> bool:
    """Whether a version satisfies a pin such as `==1.2.3` or `==1.2.*`."""
    exact = pin.removeprefix("==")
    return version.startswith(exact.removesuffix("*")) if exact.endswith("*") else version == exact


def outside_bounds(owner: str) -> dict[str, str]:
    """Packages that `owner` requires and that are installed in another version, with the bounds."""
    try:
        required = [Requirement(line) for line in importlib.metadata.requires(owner) or ()]
    except importlib.metadata.PackageNotFoundError:
        return {}
    wrong = {}
    for each in required:
        is_needed = each.marker is None or each.marker.evaluate({"extra": ""})
        found = installed_version(each.name) if is_needed else None
        if found is not None and not each.specifier.contains(found, prereleases=True):
            wrong[each.name.lower().replace("-", "_")] = str(each.specifier)
    return wrong
