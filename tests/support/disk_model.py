"""A model of a disk that loses power: real `os` calls are recorded and replayed, and the power can fail after each.

Flushed data is always kept. Of the rest, each folder keeps any number of its first changes (created, renamed and
removed names), and each file keeps any prefix of its data, independently of each other.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Node:
    """A file or a folder: what programs see, and what is flushed to the disk."""

    is_folder: bool
    data: bytes = b""
    data_on_disk: bytes = b""
    entries: dict[str, Node] = field(default_factory=dict)
    entries_on_disk: dict[str, Node] = field(default_factory=dict)
    unsynced: list[dict[str, Node | None]] = field(default_factory=list)  # a rename is one change, as in a journal

    def change(self, names: dict[str, Node | None]) -> None:
        self.unsynced.append(names)
        self.entries = changed(self.entries, names)

    def sync(self) -> None:
        self.data_on_disk, self.entries_on_disk = self.data, dict(self.entries)
        self.unsynced.clear()


def changed(entries: dict[str, Node], names: dict[str, Node | None]) -> dict[str, Node]:
    return {name: node for name, node in {**entries, **names}.items() if node is not None}


Tree = dict[str, bytes | None]  # path -> bytes, or None for a folder
Operation = tuple[Any, ...]


class Disk:
    def __init__(self) -> None:
        self.root = Node(is_folder=True)
        self.open: dict[int, Node] = {}

    def find(self, path: str) -> Node:
        node = self.root
        for part in filter(None, path.split("/")):
            node = node.entries[part]
        return node

    def apply(self, operation: Operation) -> None:
        match operation:
            case ("mkdir", path):
                folder, _, name = path.rpartition("/")
                self.find(folder).change({name: Node(is_folder=True)})
            case ("open", path, descriptor, creates):
                folder, _, name = path.rpartition("/")
                if creates and name not in self.find(folder).entries:
                    self.find(folder).change({name: Node(is_folder=False)})
                self.open[descriptor] = self.find(path)
                if creates:
                    self.open[descriptor].data = b""
            case ("write", descriptor, data):
                self.open[descriptor].data += data
            case ("fsync", descriptor):
                self.open[descriptor].sync()
            case ("close", descriptor):
                del self.open[descriptor]
            case ("rename", source, target):
                folder, _, old = source.rpartition("/")
                assert target.rpartition("/")[0] == folder, "a rename between folders is two changes"
                new = target.rpartition("/")[2]
                self.find(folder).change({old: None, new: self.find(source)})
            case ("unlink" | "rmdir", path):
                folder, _, name = path.rpartition("/")
                assert not self.find(path).entries
                self.find(folder).change({name: None})
            case _:
                raise AssertionError(operation)

    def after_crash(self, names: Callable[[int], int], data: Callable[[Node], bytes]) -> Tree:
        """The files after a restart. `names` maps the number of unflushed changes of a folder to how many survive."""
        tree: Tree = {}

        def walk(node: Node, path: str) -> None:
            tree[path] = None if node.is_folder else data(node)
            entries = node.entries_on_disk
            for change in node.unsynced[: names(len(node.unsynced))]:
                entries = changed(entries, change)
            for name, inner in sorted(entries.items()):
                walk(inner, f"{path}/{name}")

        walk(self.root, "")
        return tree


@contextmanager
def recorded(root: Path, operations: list[Operation]) -> Iterator[None]:
    """Records every `os` call that changes something in a folder, in order."""
    real = {name: getattr(os, name) for name in ("open", "write", "fsync", "close", "mkdir", "unlink", "rmdir")}
    renames = {name: getattr(os, name) for name in ("rename", "replace")}
    ours: set[int] = set()

    def below(path: Any) -> str:
        return "/" + str(Path(path).relative_to(root)) if Path(path) != root else ""

    def open_(path: Any, flags: int, mode: int = 0o777) -> int:
        descriptor: int = real["open"](path, flags, mode)
        ours.add(descriptor)
        operations.append(("open", below(path), descriptor, bool(flags & os.O_CREAT)))
        return descriptor

    def write(descriptor: int, data: Any) -> int:
        written: int = real["write"](descriptor, bytes(data)[:100])  # a short write: the caller must write the rest
        operations.append(("write", descriptor, bytes(data)[:written]))
        return written

    def on_descriptor(name: str) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            if name != "fsync":  # the model decides what is on the disk
                real[name](descriptor)
            if descriptor in ours:
                operations.append((name, descriptor))
                ours.difference_update({descriptor} if name == "close" else ())

        return call

    def on_path(name: str) -> Callable[..., None]:
        def call(path: Any, *more: Any) -> None:
            real[name](path, *more)
            operations.append((name, below(path)))

        return call

    def rename(source: Any, target: Any) -> None:
        renames["rename"](source, target)
        operations.append(("rename", below(source), below(target)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", open_)
        patch.setattr(os, "write", write)
        for name in ("fsync", "close"):
            patch.setattr(os, name, on_descriptor(name))
        for name in ("mkdir", "unlink", "rmdir"):
            patch.setattr(os, name, on_path(name))
        for name in renames:
            patch.setattr(os, name, rename)
        yield


def crashes(disk: Disk, draw: random.Random, num_mixtures: int) -> Iterator[Tree]:
    """Possible states after a crash: nothing unflushed survives; all of it; names without data, which file systems are
    known to do; data without names; and random mixtures with partly written data."""

    def lost(node: Node) -> bytes:
        return node.data_on_disk

    def torn(node: Node) -> bytes:
        return node.data if node.data == node.data_on_disk else node.data[: draw.randint(0, len(node.data))]

    yield disk.after_crash(lambda n: 0, lost)
    yield disk.after_crash(lambda n: n, lambda node: node.data)
    yield disk.after_crash(lambda n: n, lost)
    yield disk.after_crash(lambda n: 0, lambda node: node.data)
    for _ in range(num_mixtures):
        yield disk.after_crash(lambda n: draw.randint(0, n), torn)


def write_tree(tree: Tree, root: Path) -> None:
    for path, data in tree.items():
        if data is None:
            (root / path.strip("/")).mkdir(exist_ok=True)
        else:
            (root / path.strip("/")).write_bytes(data)


def tree_of(root: Path) -> Tree:
    paths = sorted([root, *root.rglob("*")])
    return {
        "/" + str(path.relative_to(root)) if path != root else "": None if path.is_dir() else path.read_bytes()
        for path in paths
    }
