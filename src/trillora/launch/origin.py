"""Where the running Trillora comes from: the file of a release, or a commit of a checkout.

    find_release()   Release("0.2.0", sha256="3f1a…") if pip installed that file; else None
    describe()       "Trillora 0.2.0, commit 2a8cafa with changes that are not committed"

A released wheel is public, so a launched notebook downloads it, and takes no other file. What is not released travels
in the bundle. pip and uv write the address and the hash of a file that they installed into `direct_url.json` (PEP 610).
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from trillora.version import REPOSITORY, __version__

CHECKOUT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Release:
    """The wheel of a released version."""

    version: str
    sha256: str

    @property
    def wheel(self) -> str:
        return f"trillora-{self.version}-py3-none-any.whl"

    @property
    def url(self) -> str:
        return f"{REPOSITORY}/releases/download/v{self.version}/{self.wheel}"

    @property
    def page(self) -> str:
        return f"{REPOSITORY}/releases/tag/v{self.version}"


def find_release() -> Release | None:
    """The release that is installed here, unchanged; None for a checkout and for any other installation."""
    try:
        installed = importlib.metadata.distribution("trillora")
        told = json.loads(installed.read_text("direct_url.json") or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    archive = told.get("archive_info", {})
    sha256 = archive.get("hashes", {}).get("sha256") or archive.get("hash", "").removeprefix("sha256=")
    release = Release(__version__, sha256)
    is_released = sha256 and told.get("url", "").partition("#")[0] == release.url
    return release if is_released and _is_unchanged(installed) else None


def _is_unchanged(installed: importlib.metadata.Distribution) -> bool:
    """Whether all files have the hashes of the wheel."""
    for file in installed.files or ():
        if file.hash is not None and file.parts[0] == "trillora":
            content = Path(str(file.locate())).read_bytes()
            if base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode() != file.hash.value:
                return False
    return True


def describe() -> str:
    """The version and the commit of the running files, for people."""
    if Path(_git("rev-parse", "--show-toplevel")) != CHECKOUT:  # not installed in a folder of another repository
        return f"Trillora {__version__}, of no known commit"
    is_changed = bool(_git("status", "--porcelain", "--", "src", "pyproject.toml"))
    changes = ", with changes that are not committed" if is_changed else ""
    return f"Trillora {__version__}, commit {_git('rev-parse', '--short', 'HEAD')}{changes}"


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=CHECKOUT, capture_output=True, text=True, check=True)  # noqa: S607
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return ""
    return done.stdout.strip()
