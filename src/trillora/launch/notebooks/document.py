"""The notebook of a bundle: short cells that call `session.Session`. One notebook for Colab, Kaggle and any machine.

    packed = pack(bundle, Path("out/chat.bundle"))
    text = make_notebook(bundle, packed, target, embed=True)

The bundle is in the notebook itself, or a file that the notebook finds by its SHA-256. Notebooks are checked by
nbformat, and equal bundles make equal notebooks.
"""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from trillora.devices.slices import Slice, find_slice
from trillora.events import Listener, ignore_events
from trillora.launch.bundle import Bundle
from trillora.recipe.schema import stages_of

LARGEST_EMBEDDED = 8 << 20  # bytes; Colab opens notebooks of up to 20 MB
LARGEST_COMPRESSED = 256 << 20
SUFFIX = ".bundle"  # a tar file. Kaggle unpacks uploads that end with .tar, .gz or .zip
WIDTH = 120

FIND = '''\
# The recipe, its data and Trillora itself are one file. It is unpacked here.
import base64, hashlib, io, os, pathlib, sys, tarfile

NAME, SHA256 = {name!r}, {sha256!r}
folder = pathlib.Path("/tmp" if "KAGGLE_KERNEL_RUN_TYPE" in os.environ else "trillora", NAME).absolute()


def find_bundle():
    """The bundle, wherever it was uploaded to."""
    if EMBEDDED:
        return io.BytesIO(base64.b64decode(EMBEDDED))
    if "COLAB_RELEASE_TAG" in os.environ and not os.path.exists(f"/content/{{NAME}}.bundle"):
        from google.colab import drive
        drive.mount("/content/drive")
    roots = ("/kaggle/input", "/content", "/content/drive/MyDrive/trillora", folder.parent / "input")
    for root in map(pathlib.Path, roots):
        pattern = f"{{NAME}}.bundle" if "content" in str(root) else f"**/{{NAME}}.bundle"
        for file in root.glob(pattern):
            with file.open("rb") as content:
                if hashlib.file_digest(content, "sha256").hexdigest() == SHA256:
                    return file.open("rb")
    raise FileNotFoundError(f"There is no {{NAME}}.bundle of this notebook. Upload it: {{', '.join(map(str, roots))}}")


with find_bundle() as packed, tarfile.open(fileobj=packed) as archive:
    archive.extractall(folder, filter="data")
sys.path.insert(0, str(next(folder.glob("*.whl"))))  # a wheel can be imported; it is installed below
from trillora.launch.notebooks.session import Session
'''
FINISH = """\
# release=True gives a Colab TPU back: it costs compute units while it is idle, too.
session.finish(release=False)"""


@dataclass(frozen=True)
class Target:
    """What differs between notebooks."""

    slice_name: str
    metadata: dict[str, Any]
    hours: float | None = None  # of a session, after which the platform ends it

    @property
    def slice(self) -> Slice:
        return find_slice(self.slice_name)


def pack(bundle: Bundle, path: Path, listener: Listener = ignore_events) -> Path:
    """Writes the bundle as one file, compressed unless that would take minutes, and returns its path."""
    with tempfile.TemporaryDirectory(prefix=".bundle-", dir=path.parent) as folder:
        making = Path(folder) / ("bundle.tar.gz" if bundle.num_bytes <= LARGEST_COMPRESSED else "bundle.tar")
        bundle.write_tar(making, listener)
        os.replace(making, path)
    return path


def make_notebook(
    bundle: Bundle, packed: Path, target: Target, *, embed: bool, export: str = "merged", prove: bool = True
) -> str:
    """The text of the .ipynb file. The file of `pack` is part of the notebook if `embed`."""
    text = base64.b64encode(packed.read_bytes()).decode() if embed else ""
    lines = [text[start : start + WIDTH] for start in range(0, len(text), WIDTH)]
    with open(packed, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    cells = [
        _text(_introduction(bundle, target)),
        _hidden("\n".join(['EMBEDDED = """\\', *lines, '"""'])),
        _code(FIND.format(name=bundle.name, sha256=sha256)),
        _text("## Recipe\nAn unfinished run resumes only with the recipe it was started with."),
        _code(f'_ = (folder / "recipe.yaml").write_text({_literal(bundle.recipe_text)}, encoding="utf-8")'),
        _text("## Install and check\nThe first minute on the chip: a tiny model is trained and compared."),
        _code(_session(bundle, target)),
        _code("session.check()" if prove else "session.check(prove=False)"),
        _text("## Train\nRun all cells again to resume an interrupted run."),
        _code("session.keep_results()\nsession.read_secrets()"),
        _code("session.train()"),
        _text("## Results"),
        *([_code("session.evaluate()")] if _has_held_out_rows(bundle) else []),
        _code("session.show_report()"),
        *([_code(f"session.export({export!r})")] if export != "none" else []),
        _code(FINISH),
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
    where = target.slice.platform.name if target.slice.platform else "a TPU"
    model = bundle.recipe.model.name
    return (
        f"# {bundle.name}: LoRA fine-tuning with Trillora on {where}\n"
        f"Base model: `{Path(model).name if os.path.isabs(model) else model}`. "
        "Run all cells. On a machine that is neither Colab nor Kaggle, the notebook works too, with local folders."
    )


def _session(bundle: Bundle, target: Target) -> str:
    secrets = ["HF_TOKEN", *(["WANDB_API_KEY"] if "wandb" in bundle.recipe.track.services else [])]
    place = bundle.recipe.train.checkpoint_dir
    url = place if place is not None and "://" in place else None
    return (
        f"session = Session(\n    NAME, folder, secrets={secrets}, hours={target.hours},\n"
        f"    devices={target.slice.num_devices}, checkpoint_url={url!r},\n)\n"
        "session.install()"
    )


def _has_held_out_rows(bundle: Bundle) -> bool:
    last = stages_of(bundle.recipe)[-1].recipe.data
    return last.validation is not None or (last.split is not None and (last.split.validation + last.split.test) > 0)


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
