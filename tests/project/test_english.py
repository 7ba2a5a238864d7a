"""The word list of `make lint` finds its words in every kind of file, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_english import BANNED, faults, tracked_files
from dose import FULL


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.md", "The run goes on."),
        ("a.py", '"""Mends the file."""\n'),
        ("a.py", "x = 1  # lies beside it\n"),
        ("a.py", "def test_it_is_told() -> None: ...\n"),
        ("a.py", 'x = f"{1} rows stand anew"\n'),
        ("a.yaml", "# Told by the recipe\n"),
        ("a.md", "Its logits are those of the base."),
        ("a.py", "x = 1  # recognised by its colour\n"),
    ],
)
def test_a_banned_word_is_found(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    found = list(faults(tmp_path / name))
    assert found and all(f"{name}:1" in fault for fault in found)


@pytest.mark.parametrize(
    "text",
    [
        'x = told["beside"]\n',
        "def logits_are_those_of_the_base() -> None: ...\n",
        "# A layer that relies on recommended ways; it's fine.\n",
    ],
)
def test_identifiers_and_longer_words_are_not(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.py").write_text(text.replace('"beside"', "beside"))
    assert list(faults(tmp_path / "a.py")) == []


def test_every_text_file_is_read_and_clean() -> None:
    """`make test` has just read them all, in `make style`: at full dose again, otherwise every tenth."""
    paths = tracked_files()
    assert len(paths) > 200 and {path.suffix for path in paths} >= {".py", ".md", ".yaml", ".toml"}
    assert [fault for path in paths[:: 1 if FULL else 10] for fault in faults(path)] == []
    assert len(BANNED) > 10
