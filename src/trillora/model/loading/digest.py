"""Digests that tie a run to its model: one of the weights, configuration and code, one of the tokenizer, and one of
each other file that an export of the run copies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from trillora.errors import TrilloraError
from trillora.files.digests import file_digest, text_digest
from trillora.model.loading.source import code_files

if TYPE_CHECKING:
    from trillora.model.loading.types import Tokenizer

# Files that an export copies, and that are not in the other digests: how answers are generated and images are read.
SETTINGS_FILES = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_SHA256 = re.compile(r"[0-9a-f]{64}")


def weights_digest(folder: Path, files: Iterable[Path]) -> str:
    """One digest of a model's weights, configuration and, if it needs its own code, of that code. Every byte is read,
    in parallel with the reading of the data: about 1 GB/s per file, and loading the weights then finds them in
    memory."""
    described = sorted([*files, *folder.glob("config.json"), *code_files(folder)])
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(_file_digest, described))
    text = json.dumps([[_name(file, folder), digest] for file, digest in zip(described, digests, strict=True)])
    return text_digest(text)


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Of everything that decides the tokens of a text or a conversation."""
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    return text_digest(tokenizer.backend_tokenizer.to_str() + template)


def settings_digests(folder: Path) -> dict[str, str]:
    return {name: _file_digest(folder / name) for name in SETTINGS_FILES if (folder / name).is_file()}


def _name(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix() if file.is_relative_to(folder) else file.name


def _file_digest(file: Path) -> str:
    digest, stored = file_digest(file), file.resolve()
    # The hub's cache names large files by their SHA-256, so damage shows even at the first start.
    if stored.parent.name == "blobs" and _SHA256.fullmatch(stored.name) and stored.name != digest:
        raise TrilloraError(
            "This file in the hub's cache is damaged: its content is not the one that was published.",
            where=f"{file}, a link to {stored}",
            do=f"remove {stored} and run again, to download it again",
        )
    return digest
