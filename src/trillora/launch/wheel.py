"""A wheel of this very package, so that another machine can install what runs here: Trillora is not on PyPI.

    build_wheel(Path("out"))  ->  out/trillora-0.2.0-py3-none-any.whl

It is made from the installed files, so it works from an editable install and without the sources' build tools. Equal
files make equal wheels, byte by byte: all times in it are fixed.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from trillora.errors import TrilloraError
from trillora.files.atomic import make_folder, write_file
from trillora.shipped import HOME, shipped_files
from trillora.version import __version__

PACKAGE = Path(__file__).parents[1]
TIME = (1980, 1, 1, 0, 0, 0)  # the first one that a zip file can hold
REINSTALL = "install Trillora again, for example from its checkout: pip install -e ."


def build_wheel(folder: Path) -> Path:
    """Writes the wheel into `folder` and returns its path."""
    name, content = wheel_content()
    make_folder(folder)
    write_file(folder / name, content)
    return folder / name


def wheel_content() -> tuple[str, bytes]:
    """The file name of the wheel, and its bytes."""
    try:
        installed = importlib.metadata.distribution("trillora")
    except importlib.metadata.PackageNotFoundError as error:
        what = "Trillora is not installed here: its list of dependencies is missing."
        raise TrilloraError(what, where=str(PACKAGE), do=REINSTALL) from error
    if installed.version != __version__:  # an editable install whose sources were updated
        what = f"The installation of Trillora is of version {installed.version}, its files are of {__version__}."
        raise TrilloraError(what, where=str(PACKAGE), do=REINSTALL)
    info = f"trillora-{__version__}.dist-info"
    files = dict(_package_files())
    for name, text in _info_files(installed).items():
        files[f"{info}/{name}"] = text.encode()
    record = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, TIME)
            entry.external_attr = 0o644 << 16  # everybody may read
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return f"trillora-{__version__}-py3-none-any.whl", buffer.getvalue()


def _package_files() -> Iterator[tuple[str, bytes]]:
    """The package's modules and data, by their paths in the wheel."""
    for path in sorted(PACKAGE.rglob("*")):
        inside = path.relative_to(PACKAGE)
        is_hidden = any(part.startswith(".") or part == "__pycache__" for part in inside.parts)
        if inside.parts[0] == HOME.name:  # a link in a checkout, which has more than the recipes
            continue
        if path.is_file() and not is_hidden and path.suffix != ".pyc":
            yield f"trillora/{inside.as_posix()}", path.read_bytes()
    for path in shipped_files():
        yield f"trillora/recipes/{path.relative_to(HOME).as_posix()}", path.read_bytes()


def _info_files(installed: importlib.metadata.Distribution) -> dict[str, str]:
    """What an installer reads: dependencies and the entry point of the `trillora` command."""
    metadata = installed.read_text("METADATA") or installed.read_text("PKG-INFO")  # the second in a source folder
    commands = installed.read_text("entry_points.txt")
    if metadata is None or commands is None:
        what = "The installation of Trillora is incomplete: its metadata cannot be read."
        raise TrilloraError(what, where=str(PACKAGE), do=REINSTALL)
    files = {
        "METADATA": metadata,
        "WHEEL": "Wheel-Version: 1.0\nGenerator: trillora\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": commands,
    }
    licence = installed.read_text("licenses/LICENSE")
    return files if licence is None else {**files, "licenses/LICENSE": licence}


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
