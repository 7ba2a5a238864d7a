"""Compares the files around the weights with what an export of this run writes: key by key, and nothing else.

    config.json                  rope_theta is 500000 instead of 10000
    tokenizer.json               decoder is {"type": "Fuse"} instead of {"type": "ByteLevel", …}
    additional_chat_templates/   should not be there

A JSON file may be written differently: another order or indentation, null for a key that is missing. Keys that only say
who wrote the file do not count.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from trillora.certify.certificate import FILE, PAGE, Check, FileFacts
from trillora.certify.gguf_file import GgufFile
from trillora.certify.subject import Subject
from trillora.certify.weights.checks import stored_dtype, tensors_of
from trillora.export.gguf.lora import lora_values
from trillora.export.merged import other_files
from trillora.export.ollama import MODELFILE, write_modelfile
from trillora.files.bounded import read_bounded
from trillora.files.read_json import parse_json
from trillora.files.storage import MARK
from trillora.model.adapters import CONFIG_FILE, WEIGHTS_FILE
from trillora.runs.files import MERGE_FILE, ROPE_FILE

CARD = "README.md"
MAX_BYTES = 64 << 20
DO = "export it again, or copy the file from the base or the run"
# Files that people add and no program loads.
DOCUMENTS = (".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".pdf", ".html", ".bib", ".cff")
DOCUMENT_NAMES = ("license", "notice", "copying", "use_policy", "authors", ".gitattributes", ".gitignore")
_WRITER = (
    "transformers_version",
    "_name_or_path",
    "name_or_path",
    "is_local",
    "local_files_only",
    "_from_model_config",
)
_MANY = 4  # differences that are named


def check_contents(subject: Subject, files: Mapping[str, FileFacts]) -> Iterator[Check]:
    """Of an adapter or a merged model: tokenizer, configuration, templates, and no other file."""
    expected = expected_files(subject)
    is_merged = subject.kind == "merged"
    wrong: dict[str, list[str]] = {}
    for name, content in expected.items():
        if name in files:
            found = differences(name, read_bounded(subject.folder / name, MAX_BYTES), content)
        else:
            is_needed = name not in _OPTIONAL if is_merged else name == ROPE_FILE
            found = ["is missing"] if is_needed else []
        if found:
            wrong[name] = found
    for name, found in wrong.items():
        what = f"{name}: {'; '.join(found[:_MANY])}."
        yield Check("contents", name, "failed", what, len(found), 0, DO)
    if not wrong:
        present = sum(name in files for name in expected)
        yield Check("contents", "files", "ok", f"{present:,} files are what an export of this run writes.", 0, 0)
    yield nothing_else(subject, files, expected)


_OPTIONAL = ("special_tokens_map.json", "added_tokens.json")  # transformers does not need them


def expected_files(subject: Subject) -> dict[str, bytes]:
    source = subject.source
    if subject.kind == "merged":
        return other_files(source, subject.merged, stored_dtype(subject.expected, tensors_of(subject.folder)))
    return {**source.tokenizer_files(), **source.base.rope_file()}


def nothing_else(subject: Subject, files: Mapping[str, FileFacts], expected: Mapping[str, bytes]) -> Check:
    """Any other file may be loaded by some program: code, a template, weights."""
    own = {
        "adapter": (CONFIG_FILE, WEIGHTS_FILE, MARK, MERGE_FILE),
        "ollama": (MODELFILE,),
    }.get(subject.kind, ())
    known = {*own, *expected, CARD, FILE, PAGE}
    weights = {"merged": ".safetensors", "gguf": ".gguf", "lora-gguf": ".gguf", "ollama": ".gguf"}.get(subject.kind)
    extra = [name for name in files if name not in known and not is_document(name)]
    extra = [name for name in extra if weights is None or "/" in name or not name.endswith((weights, ".index.json"))]
    if extra:
        what = f"{', '.join(extra[:_MANY])} should not be there: an export of this run has no such file."
        do = f"remove {', '.join(extra[:_MANY])}" + (" …" if len(extra) > _MANY else "")
        return Check("contents", "nothing else", "failed", what, len(extra), 0, do)
    return Check("contents", "nothing else", "ok", "There is no other file that a program might load.", 0, 0)


def is_document(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix.lower() in DOCUMENTS or path.name.lower().partition(".txt")[0] in DOCUMENT_NAMES


# ---- comparing


def differences(name: str, found: bytes, expected: bytes) -> list[str]:
    """What differs, in words; empty if the files mean the same."""
    if found == expected:
        return []
    if not name.endswith(".json"):
        return ["it differs from the one that is expected"]
    own, wanted = (
        parse_json(data, dict[str, Any], where=name, do=DO, allow_infinity=True) for data in (found, expected)
    )
    if name == "tokenizer.json":
        own, wanted = _plain_tokenizer(own), _plain_tokenizer(wanted)
    if name in ("config.json", "generation_config.json"):
        loaded, expected_loaded = _as_loaded(name, own), _as_loaded(name, wanted)
        # Another program may read a key that transformers ignores.
        own, wanted = {**own, **loaded}, {**{key: wanted.get(key) for key in own}, **expected_loaded}
    if name == "tokenizer_config.json":
        own, wanted = (
            {**each, "tokenizer_class": _SAME_CLASS.get(str(each.get("tokenizer_class")), each.get("tokenizer_class"))}
            for each in (own, wanted)
        )
    return list(_differ(own, wanted, ""))


_SAME_CLASS = {"TokenizersBackend": "PreTrainedTokenizerFast"}  # its name since transformers 5


def _as_loaded(name: str, content: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the defaults of its class, and older names of keys as newer ones."""
    from transformers import AutoConfig, GenerationConfig

    try:
        kind = GenerationConfig if name == "generation_config.json" else AutoConfig.for_model
        loaded: dict[str, Any] = kind(**content).to_dict()
        return loaded
    except Exception:  # a class that refuses these values, or one that transformers does not have
        return content


def _plain_tokenizer(content: dict[str, Any]) -> dict[str, Any]:
    """Merges are pairs, in newer files, or one text."""
    model = dict(content.get("model") or {})
    if isinstance(model.get("merges"), list):
        model["merges"] = [" ".join(each) if isinstance(each, list) else each for each in model["merges"]]
    return {**{key: value for key, value in content.items() if key != "version"}, "model": model}


def _differ(own: object, wanted: object, path: str) -> Iterator[str]:
    if own == wanted and isinstance(own, bool) == isinstance(wanted, bool):
        return
    if isinstance(own, dict) and isinstance(wanted, dict):
        for key in sorted(own.keys() | wanted.keys(), key=str):
            if key not in _WRITER:
                yield from _differ(own.get(key), wanted.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(own, list) and isinstance(wanted, list) and len(own) == len(wanted):
        for number, (one, other) in enumerate(zip(own, wanted, strict=True)):
            yield from _differ(one, other, f"{path}[{number}]")
    elif own != wanted or isinstance(own, bool) != isinstance(wanted, bool):
        yield f"{path} is {_shown(own)} instead of {_shown(wanted)}"


def _shown(value: object) -> str:
    if value is None:
        return "missing"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"


# ---- GGUF and Ollama


_DESCRIBES = tuple(
    f"general.{name}"
    for name in (
        *("alignment", "author", "base_model", "basename", "dataset", "description", "doi", "file_type", "finetune"),
        *("languages", "license", "organization", "quantized_by", "repo_url", "size_label", "source", "tags", "url"),
        *("uuid", "version"),
    )
)


def check_header(found: Mapping[str, object], values: Mapping[str, object]) -> Iterator[Check]:
    """The header, key by key. Keys that describe the file for people may differ."""
    wrong = []
    for key in sorted(found.keys() | values.keys()):
        if key.startswith(_DESCRIBES):
            continue
        own, wanted = _plain(found.get(key)), _plain(values.get(key))
        if key == "general.name":  # llama.cpp reads one thing in it (`export/gguf/write.py`, model_name)
            own, wanted = ("phi-3" in str(each).lower() for each in (own, wanted))
        if own != wanted:
            wrong.append(f"{key} {_changed(own, wanted)}")
    if wrong:
        what = f"{len(wrong):,} keys of the header are wrong: {'; '.join(wrong[:_MANY])}."
        yield Check("contents", "header", "failed", what, len(wrong), 0, DO)
    else:
        yield Check("contents", "header", "ok", f"{len(found):,} keys of the header are as exported.", 0, 0)


def _plain(value: object) -> Any:
    """A value of a header as a Python value: floats are stored in float32, pairs of merges as one text."""
    if isinstance(value, float | np.floating):
        return float(np.float32(value))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(each) for each in value]
    return value


def _changed(own: object, wanted: object) -> str:
    if isinstance(own, list) and isinstance(wanted, list) and len(own) == len(wanted):
        places = [number for number, (one, other) in enumerate(zip(own, wanted, strict=True)) if one != other]
        first = places[0]
        entry = f"{_shown(own[first])} instead of {_shown(wanted[first])}"
        return f"differs in {len(places):,} entries, first {first}: {entry}"
    return f"is {_shown(own)} instead of {_shown(wanted)}"


def check_lora_header(subject: Subject, model: GgufFile) -> Iterator[Check]:
    alpha = "adapter.lora.alpha"  # counts with the arrays
    headers = (model.header(), lora_values(subject.source)[0])
    found, wanted = ({key: value for key, value in each.items() if key != alpha} for each in headers)
    yield from check_header(found, wanted)


def check_modelfile_text(subject: Subject, gguf: str) -> Iterator[Check]:
    """Ollama's Modelfile, instruction by instruction."""
    source = subject.source
    wanted = instructions(write_modelfile(source, gguf))
    own = instructions(read_bounded(subject.folder / MODELFILE, MAX_BYTES).decode("utf-8", errors="replace"))
    if own == wanted:
        yield Check("contents", "Modelfile", "ok", f"{len(own)} instructions are as exported.", 0, 0)
        return
    pairs = itertools.zip_longest(own, wanted, fillvalue=("nothing", ""))
    one, other = next((" ".join(a)[:80], " ".join(b)[:80]) for a, b in pairs if a != b)
    what = f"The Modelfile has {one!r} instead of {other!r}."
    yield Check("contents", "Modelfile", "failed", what, do="export it again: trillora export RUN --to ollama")


# A name, for PARAMETER another name, and a text: in three quotes, in one, or to the end of the line.
_INSTRUCTION = re.compile(
    r'^[ \t]*([A-Za-z]+)[ \t]+((?:(?<=PARAMETER )\w+[ \t]+)?)(?:"""(.*?)"""|"([^"\n]*)"|([^\n]*))[ \t]*$',
    re.DOTALL | re.MULTILINE,
)


def instructions(modelfile: str) -> list[tuple[str, str]]:
    """The instructions that Ollama follows, sorted: their order, comments and licenses do nothing.

    >>> instructions('FROM ./a.gguf\\n# mine\\nPARAMETER stop "<end>"')
    [('FROM', './a.gguf'), ('PARAMETER stop', '<end>')]
    """
    found, at = [], 0
    while at < len(modelfile):
        match = _INSTRUCTION.match(modelfile, at)
        if match:
            name = f"{match[1].upper()} {match[2]}".strip()
            found.append((name, next(text for text in match.groups()[2:] if text is not None)))
        at = (match.end() if match else modelfile.find("\n", at) % (len(modelfile) + 1)) + 1
    return sorted(each for each in found if each[0] != "LICENSE")
