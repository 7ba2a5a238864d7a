"""A recipe with everything it needs on another machine: its local files, and Trillora itself as a wheel.

    bundle = make_bundle(Path("recipes/chat.yaml"), ["train.steps=100"])
    bundle.write_folder(Path("chat"))

    chat/recipe.yaml                           its local paths point into this folder: path: ./data/chats.jsonl
    chat/data/chats.jsonl
    chat/trillora-0.2.0-py3-none-any.whl
    chat/requirements.txt                      the exact packages, with hashes: the set tpu and the wheel

Overrides are part of the recipe in the bundle. Hub ids and URLs stay as they are. A recipe with a secret, and a folder
with a link that leads out of it, are refused, because a bundle is uploaded.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from trillora.data.reading.files import expand
from trillora.early.training import check_inputs
from trillora.errors import TrilloraError
from trillora.events import Listener, Note, Progress, ignore_events
from trillora.files.atomic import make_folder, new_folder, sync_folder
from trillora.files.cache_dir import cache_root, writing_cache
from trillora.files.hub import hub_cache
from trillora.launch.install import REQUIREMENTS, requirements
from trillora.launch.wheel import build_wheel, wheel_content
from trillora.recipe import run_file, yaml
from trillora.recipe.data_section import DataSection
from trillora.recipe.load import load_recipe
from trillora.recipe.losses import LossOptions, is_file
from trillora.recipe.schema import EMBEDDED, PhaseOptions, Recipe
from trillora.recipe.section import Section
from trillora.runs.files import ADAPTER
from trillora.safe_text import visible_line
from trillora.secrets import mask_values, secrets_of_environment

RECIPE = "recipe.yaml"
MAX_SLUG = 40
_BLOCK = 1 << 20


@dataclass(frozen=True)
class BundledFile:
    """A local file that the recipe needs."""

    source: Path
    name: str  # its path in the bundle, with "/"


@dataclass(frozen=True)
class Bundle:
    """A recipe and its files, ready to be written as a folder or a tar file."""

    name: str  # a slug: lower case letters, digits and "-"
    recipe: Recipe  # with the paths of this machine
    recipe_text: str  # YAML whose local paths point into the bundle
    files: tuple[BundledFile, ...]
    wheel: Path
    set_name: str = "tpu"  # of the packages: Colab's, Kaggle's and Cloud TPUs install the same ones

    @property
    def num_bytes(self) -> int:
        """The size of all files, without the few that are written here."""
        return sum(file.source.stat().st_size for file in (*self.files, BundledFile(self.wheel, self.wheel.name)))

    @property
    def requirements(self) -> str:
        """What `launch.install` installs: a set that was tested, what the recipe needs in addition, and the wheel."""
        return requirements(self.packages, self.wheel)

    @property
    def packages(self) -> tuple[str, ...]:
        """The set, and what the recipe needs in addition."""
        embedded = (EMBEDDED,) if self.recipe.model.name == EMBEDDED else ()
        return (self.set_name, *self.recipe.track.services, *embedded)

    def write_folder(self, folder: Path, listener: Listener = ignore_events) -> None:
        """Writes all files into a new folder, completely or not at all."""
        if folder.is_dir() and any(folder.iterdir()):
            do = "remove it, or name another folder"
            raise TrilloraError("This folder is not empty.", where=str(folder), do=do)
        with new_folder(folder) as making:
            progress = _Bytes(self.num_bytes, listener)
            for name, content in self.contents():
                make_folder((making / name).parent)
                with open(making / name, "wb") as target, _opened(content) as source:
                    progress.copy(source, target)

    def write_tar(self, path: Path, listener: Listener = ignore_events, *, has_wheel: bool = True) -> None:
        """Writes all files into a tar file, compressed if its name ends with .gz. Equal bundles make equal files.
        Without the wheel, the machine downloads it."""
        make_folder(path.parent)
        making = path.with_name(f".{path.name}.making-{os.getpid()}")
        try:
            with open(making, "wb") as file:
                if path.suffix == ".gz":
                    with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
                        self._pack(packed, listener, has_wheel)  # type: ignore[arg-type]  # a BinaryIO in all but name
                else:
                    self._pack(file, listener, has_wheel)
                file.flush()
                os.fsync(file.fileno())
            os.replace(making, path)
        except BaseException:
            making.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)

    def _pack(self, file: BinaryIO, listener: Listener, has_wheel: bool) -> None:
        progress = _Bytes(self.num_bytes, listener)
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for name, content in self.contents(has_wheel=has_wheel):
                entry = tarfile.TarInfo(name)  # owner and time stay zero
                entry.size = content.stat().st_size if isinstance(content, Path) else len(content)
                with _opened(content) as source:
                    archive.addfile(entry, progress.counted(source))

    def contents(self, *, has_wheel: bool = True) -> Iterator[tuple[str, Path | bytes]]:
        """The name of every file, and the file or its bytes."""
        yield RECIPE, self.recipe_text.encode()
        yield REQUIREMENTS, self.requirements.encode()
        if has_wheel:
            yield self.wheel.name, self.wheel
        yield from ((file.name, file.source) for file in self.files)


def make_bundle(
    recipe_path: Path,
    overrides: Sequence[str] = (),
    *,
    tiny: bool = False,
    set_name: str = "tpu",
    listener: Listener = ignore_events,
) -> Bundle:
    """Reads a recipe and finds its files. Raises an error if one is missing, or if the recipe has a secret. `set_name`
    is the set of packages for the machine."""
    recipe = load_recipe(recipe_path, overrides, tiny=True) if tiny else load_recipe(recipe_path, overrides)
    refuse_secrets(recipe, str(recipe_path))
    check_inputs(recipe)
    if (place := recipe.train.checkpoint_dir) and "://" not in place:
        listener(Note("train.checkpoint_dir is a folder of this machine: it is left out."))
    files = _Files()
    moved = _moved(recipe, files)
    title = visible_line(recipe_path.name) + (", with the overrides of the launch" if overrides else "")
    return Bundle(
        name=slug(recipe_path.stem),
        recipe=recipe,
        recipe_text=_as_yaml(moved, title),
        files=tuple(files.files),
        wheel=_cached_wheel(),
        set_name=set_name,
    )


def slug(text: str) -> str:
    """A name that is valid everywhere: lower case letters, digits and single hyphens.

    >>> slug("Qwen3 Coder_phases")
    'qwen3-coder-phases'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:MAX_SLUG].rstrip("-") or "recipe"


def refuse_secrets(recipe: Recipe, where: str) -> None:
    """Raises an error if an option looks like a key, or is an address with credentials."""
    known = secrets_of_environment()
    secret = [option for option, text in run_file.texts(recipe) if mask_values(text, known, option) != text]
    secret += json.loads(run_file.dump(recipe))["withheld"]
    if secret:
        raise TrilloraError(
            f"The recipe has a secret in {secret[0]}, and a recipe that is launched is uploaded.",
            where=where,
            do="remove it, revoke it if others have seen it, and use the platform's store of secrets (HF_TOKEN)",
        )


def _cached_wheel() -> Path:
    """The wheel in the cache. Its folder is named by its content, so no launch changes the wheel of another."""
    _, content = wheel_content()
    folder = cache_root() / "wheels" / hashlib.sha256(content).hexdigest()[:16]
    with writing_cache(folder):
        return build_wheel(folder)


Options = TypeVar("Options", bound=PhaseOptions)


class _Files:
    """The files of a bundle, and where each local path of the recipe is in it."""

    def __init__(self) -> None:
        self.files: list[BundledFile] = []
        self._places: dict[str, str] = {}

    def data(self, path: str) -> str:
        """Data: a file; or the files of a folder or a glob, in a folder."""
        local = path.removeprefix("file://")
        if not os.path.isabs(local):
            return path  # a hub id or a URL
        found = [Path(file.path) for file in expand([local])]
        if not glob.has_magic(local) and not os.path.isdir(local):
            return self._place(path, "data", found, found[0].parent, is_folder=False)
        fixed = local if os.path.isdir(local) else os.path.dirname(re.split(r"[*?\[]", local)[0])
        return self._place(path, "data", found, Path(fixed), is_folder=True)

    def file(self, path: str | None, option: str) -> str | None:
        """A JSON Schema or a chat template. The name of a built-in template is not a path."""
        if path is None or not os.path.isabs(path):
            return path
        if not os.path.isfile(path):
            raise TrilloraError(f"The file {path} does not exist.", where=option, do="check the path in the recipe")
        return self._place(path, "files", [Path(path)], Path(path).parent, is_folder=False)

    def folder(self, path: str, option: str) -> str:
        """A model or an adapter: all files of a folder, except hidden ones."""
        if not os.path.isabs(path):
            return path
        home = Path(path)
        inside = [file for file in sorted(home.rglob("*")) if file.is_file() and not _hidden(file.relative_to(home))]
        if not inside:
            raise TrilloraError(f"The folder {path} has no files.", where=option, do="check the path in the recipe")
        return self._place(path, option.partition(".")[0], inside, home, is_folder=True)

    def _place(self, path: str, home: str, sources: list[Path], root: Path, *, is_folder: bool) -> str:
        if path in self._places:
            return self._places[path]
        name = re.sub(r"[^\w.-]+", "-", root.name if is_folder else sources[0].name).lstrip(".") or home
        taken = set(self._places.values())
        place = next(p for n in range(len(taken) + 1) if (p := f"./{home}/{f'{n}-' if n else ''}{name}") not in taken)
        for source in sources:
            _refuse_name(source)
            if is_folder:
                _refuse_way_out(source, root)
            inner = f"/{source.relative_to(root).as_posix()}" if is_folder else ""
            self.files.append(BundledFile(source, f"{place[2:]}{inner}"))
        self._places[path] = place
        return place


def _moved(recipe: Recipe, files: _Files) -> Recipe:
    """The recipe with paths in the bundle instead of paths on this machine."""
    name = recipe.model.name
    home = os.path.realpath(name) if os.path.isdir(name) else name  # a bare name counts from the current folder
    sections: dict[str, Any] = {
        "model": recipe.model.model_copy(update={"name": files.folder(home, "model.name")}),
        "train": _moved_loss(recipe.train.model_copy(update=_without_local_folder(recipe)), files),
    }
    if recipe.data is not None:
        sections["data"] = _moved_data(recipe.data, files)
    for part in ("stages", "phases"):
        if (parts := getattr(recipe, part)) is not None:
            sections[part] = tuple(
                _moved_loss(p.model_copy(update={"data": _moved_data(p.data, files)}), files) for p in parts
            )
    start = recipe.lora.model_dump(by_alias=True).get("from")
    if start is not None:
        [field_name] = [name for name, info in type(recipe.lora).model_fields.items() if info.alias == "from"]
        adapter = os.path.join(start, ADAPTER)  # of a run
        place = files.folder(adapter if os.path.isdir(adapter) else start, "lora.from")
        sections["lora"] = recipe.lora.model_copy(update={field_name: place})
    return recipe.model_copy(update=sections)


def _without_local_folder(recipe: Recipe) -> dict[str, None]:
    place = recipe.train.checkpoint_dir
    return {"checkpoint_dir": None} if place is not None and "://" not in place else {}


def _moved_loss(options: Options, files: _Files) -> Options:
    """A loss may be a file of its own."""
    if not isinstance(options, LossOptions):
        return options

    def moved(name: str) -> str:
        return files.file(name, "train.loss") or name if is_file(name) else name

    loss = moved(options.loss) if isinstance(options.loss, str) else tuple(map(moved, options.loss))
    return options.model_copy(update={"loss": loss}) if loss != options.loss else options


def _moved_data(data: DataSection, files: _Files) -> DataSection:
    changed: dict[str, Any] = {
        "path": files.data(data.path)
        if isinstance(data.path, str)
        else tuple(source.model_copy(update={"path": files.data(source.path)}) for source in data.path)
    }
    if data.validation is not None:
        changed["validation"] = files.data(data.validation)
    for option in ("json_schema", "chat_template"):
        if (path := getattr(data, option)) is not None:
            changed[option] = files.file(path, f"data.{option}")
    return data.model_copy(update=changed)


def _refuse_name(source: Path) -> None:
    if not source.name.isprintable():
        what = "This file name has a line break or another control character."
        raise TrilloraError(what, where=visible_line(str(source)), do="rename the file")


def _refuse_way_out(source: Path, root: Path) -> None:
    """A folder from another person may have links to private files of this machine, and a bundle is uploaded."""
    target, root = source.resolve(), root.resolve()
    if target.is_relative_to(root) or _is_download(target, root):
        return
    raise TrilloraError(
        "This link leads out of its folder, and a bundle is uploaded.",
        where=f"{source} -> {target}",
        do="remove it; or, if the file is yours and belongs to the folder, copy it to the place of the link",
    )


def _is_download(file: Path, root: Path) -> bool:
    """Whether it is in the hub's cache. There, the files of a snapshot are links: config.json -> ../../blobs/3f1a…"""
    repository = file.parent.parent
    is_known = repository.parent == hub_cache().resolve() or root.is_relative_to(repository / "snapshots")
    return file.parent.name == "blobs" and is_known


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _as_yaml(recipe: Recipe, title: str) -> str:
    """The options that were given, section by section. `load_recipe` reads them back unchanged."""
    lines = [f"# {title}"]
    for name, section in _given(recipe).items():
        if isinstance(section, dict):
            lines += [f"{name}:", *(f"  {key}: {yaml.write(value)}" for key, value in section.items())]
        elif name in ("stages", "phases"):
            lines += [f"{name}:", *(f"  - {yaml.write(part)}" for part in section)]
        else:
            lines.append(f"{name}: {yaml.write(section)}")
    return "\n".join(lines) + "\n"


def _given(value: object) -> Any:
    """A section as the mapping that a person would have written."""
    if isinstance(value, Section):
        fields = {
            info.alias or name: (getattr(value, name), info.default)
            for name, info in type(value).model_fields.items()
            if name in value.model_fields_set
        }
        return {name: _given(inner) for name, (inner, default) in fields.items() if inner is not None or default}
    if isinstance(value, tuple | list):
        return [_given(inner) for inner in value]
    return {key: _given(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def _opened(content: Path | bytes) -> BinaryIO:
    return open(content, "rb") if isinstance(content, Path) else io.BytesIO(content)


@dataclass
class _Bytes:
    """Reports how many bytes of a bundle are written."""

    total: int
    listener: Listener
    done: int = field(default=0)

    def copy(self, source: BinaryIO, target: BinaryIO) -> None:
        shutil.copyfileobj(self.counted(source), target, _BLOCK)

    def counted(self, source: BinaryIO) -> Any:
        return _Counted(source, self)

    def add(self, number: int) -> None:
        self.done = min(self.done + number, self.total)
        self.listener(Progress("writing the bundle", self.done, self.total, "bytes"))


@dataclass(frozen=True)
class _Counted:
    """A file whose reads are counted."""

    source: BinaryIO
    progress: _Bytes

    def read(self, size: int = -1) -> bytes:
        block = self.source.read(size)
        self.progress.add(len(block))
        return block
