"""The command that installs what an option of Trillora needs in addition.

>>> install_command("export")
'pip install "gguf>=0.17"'

It names the packages themselves. `pip install "trillora[export]"` would ask the package index for a project called
trillora, and the one that was installed came from a checkout or from a launch.
"""

from __future__ import annotations

import functools
import importlib.metadata


@functools.cache
def install_command(extra: str) -> str:
    """For an extra of pyproject.toml, with its bounds."""
    from packaging.requirements import Requirement

    try:
        required = [Requirement(line) for line in importlib.metadata.requires("trillora") or ()]
    except importlib.metadata.PackageNotFoundError:  # imported from a folder
        required = []
    needed = [each for each in required if each.marker and each.marker.evaluate({"extra": extra})]
    names = [f'"{str(each).partition(";")[0].strip()}"' for each in needed]
    return f"pip install {' '.join(names)}" if names else f'pip install -e ".[{extra}]" in the checkout of Trillora'
