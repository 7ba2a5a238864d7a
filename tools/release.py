"""Builds the sdist and the wheel of a release: from the tracked files, as a clone has them, and without the network.

    python tools/release.py         # dist/trillora-0.2.0.tar.gz and dist/trillora-0.2.0-py3-none-any.whl

The wheel is built from the unpacked sdist, so the sdist is complete. Times in the wheel are the day of the version in
CHANGELOG.md: equal sources make equal wheels, byte by byte. It refuses changes that are not committed, and a version
without a section in CHANGELOG.md. tests/system/test_release.py installs the wheel in a new environment.

The notebooks in notebooks/ name the wheel by its SHA-256. If they name another one, they are written again and have to
be committed. They are no part of the wheel, so the second build makes the same one, and it is uploaded to the release.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from trillora.version import __version__

FIRST_DAY = "1980-01-01"  # that a wheel can have
ROOT = Path(__file__).resolve().parents[1]
HOOK = "import sys; from setuptools import build_meta; getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2])"


class NotReady(Exception):
    """The source cannot be released; the message says what to do."""


def build(folder: Path) -> tuple[Path, Path]:
    """Builds sdist and wheel into a folder, and returns their paths."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        clone, unpacked = Path(place) / "clone", Path(place) / "sdist"
        copy_tracked(clone)
        sdist = run_backend("sdist", clone, folder)
        with tarfile.open(sdist) as archive:
            archive.extractall(unpacked, filter="data")
        (source,) = unpacked.iterdir()
        return sdist, run_backend("wheel", source, folder)


def copy_tracked(folder: Path) -> None:
    """Copies the tracked files as they are now. Links stay links."""
    for name in git("ls-files", "-z").split("\0"):
        if name and os.path.lexists(ROOT / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)


def run_backend(kind: Literal["sdist", "wheel"], source: Path, folder: Path) -> Path:
    """Builds with the installed setuptools. Returns the path of what it has built."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        epoch = {"SOURCE_DATE_EPOCH": str(seconds_of_day(find_day(__version__) or FIRST_DAY))}
        command = [sys.executable, "-c", HOOK, kind, place]
        done = subprocess.run(command, cwd=source, env={**os.environ, **epoch}, capture_output=True, text=True)
        if done.returncode:
            raise NotReady(f"{done.stdout[-2000:]}{done.stderr[-2000:]}\nThe {kind} cannot be built.")
        (built,) = Path(place).iterdir()
        return built.replace(folder / built.name)


def check_ready(version: str) -> None:
    """Raises an error if what would be built is not what a tag would name."""
    if changed := git("status", "--porcelain"):
        raise NotReady(f"Commit or remove these first:\n{changed}")
    if find_day(version) is None:
        raise NotReady(f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'.")


def find_day(version: str) -> str | None:
    """The day of a version in CHANGELOG.md, such as 2026-11-18."""
    pattern = rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)$"
    found = re.search(pattern, (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    return found[1] if found else None


def seconds_of_day(day: str) -> int:
    return int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp())


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main() -> int:
    import notebooks

    try:
        check_ready(__version__)
        sdist, wheel = build(ROOT / "dist")
        for path in (sdist, wheel):
            print(f"{path.relative_to(ROOT)}  {path.stat().st_size:,} bytes")
        if notebooks.write(notebooks.release_of(wheel)):
            raise NotReady("notebooks/ named another wheel, and was written again. Commit it, and build again.")
    except NotReady as error:
        print(error, file=sys.stderr)
        return 1
    print(f"To tag it: git tag -a v{__version__} -m 'Trillora {__version__}'")
    print(f"Then upload both files to the release, so that the notebooks find {notebooks.release_of(wheel).url}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
