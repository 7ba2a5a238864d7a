"""A certificate: what was checked about an adapter or an export, with figures, and what is needed to check it again.

    certificate.json
    {"format": 1, "kind": "adapter", "checks": [{"part": "files", "name": "checksums", "status": "ok", …}, …],
     "files": {"adapter_config.json": {"sha256": …, "size": 469}, …}, "logits": […], …, "digest": …}

`digest` covers everything else, so a certificate that was edited is noticed. It is no signature: a person who changes
an adapter can also write a new certificate. Compare with the run, or with a certificate from somewhere else.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from trillora.errors import TrilloraError
from trillora.files.atomic import write_file
from trillora.files.digests import json_digest
from trillora.files.read_json import read_json

FILE, PAGE = "certificate.json", "certificate.html"
MAX_BYTES = 16 << 20
CHANGED_ROWS = ("masks", "data")
DO = "remove it and run `trillora certify` again"

Status = Literal["ok", "warning", "failed", "skipped"]
Kind = Literal["adapter", "merged", "gguf", "lora-gguf", "ollama"]
Text = Annotated[str, Field(max_length=20_000)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class Check:
    """One thing that was measured."""

    part: Text  # files, trained, contents, reader, servers, tokenizer, masks, norms, scores
    name: Text
    status: Status  # a warning is a limit of another program, or something unusual that the run confirms
    what: Text  # what was found, one sentence
    figure: Finite | None = None
    limit: Finite | None = None
    do: Text = ""


@dataclass(frozen=True)
class FileFacts:
    sha256: Digest
    size: Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class PromptLogits:
    """The next token after a prompt: log-probabilities of the most likely ones of the trained model."""

    tokens: Annotated[tuple[Token, ...], Field(min_length=1, max_length=4096)]
    ids: Annotated[tuple[Token, ...], Field(min_length=1, max_length=4096)]
    trained: Annotated[tuple[Finite, ...], Field(max_length=4096)]
    base: Annotated[tuple[Finite, ...], Field(max_length=4096)]
    stored: Annotated[tuple[Finite, ...], Field(max_length=4096)] = ()  # of the weights as an export rounds them


@dataclass(frozen=True)
class Layer:
    """Norms of an adapted layer, over all entries (Frobenius)."""

    name: Text
    rank: Annotated[int, Field(ge=0)]
    scale: Finite
    change: Finite  # of scale * B A
    base: Finite | None  # of the base's weight; None if it was not read


@dataclass(frozen=True)
class Certificate:
    """What `trillora certify` found."""

    kind: Kind
    target: Text  # the folder as the user named it
    created: Text
    versions: Annotated[dict[Text, Text], Field(max_length=32)]
    base: Text | None  # hub id or folder
    base_digest: Digest | None
    trained: Text  # where the trained weights are from
    trained_digest: Digest | None
    files: Annotated[dict[Text, FileFacts], Field(max_length=10_000)]
    checks: Annotated[tuple[Check, ...], Field(max_length=10_000)]
    logits: Annotated[tuple[PromptLogits, ...], Field(max_length=256)] = ()
    layers: Annotated[tuple[Layer, ...], Field(max_length=100_000)] = ()
    seconds: Finite = 0.0

    @property
    def passed(self) -> bool:
        return all(check.status != "failed" for check in self.checks)

    @property
    def not_proved(self) -> tuple[Check, ...]:
        """What a full certificate needs and could not be checked here."""
        needed = {("trained", "weights"), ("trained", "tensors"), ("trained", "change"), ("trained", "base weights")}
        skipped = [check for check in self.checks if check.status == "skipped"]
        found = [check for check in skipped if check.part == "reader" or (check.part, check.name) in needed]
        # A warning, because the adapter may be right; but its rows cannot be looked at.
        return (*found, *(check for check in self.checks if (check.part, check.name) == CHANGED_ROWS))

    def is_proved(self, part: str) -> bool:
        """Whether checks of this part passed, none failed, and none that is needed was skipped."""
        found = [check for check in self.checks if check.part == part]
        is_bad = any(check.status == "failed" or check in self.not_proved for check in found)
        if part == "masks":  # the example of the run alone, or rows with prompts, prove nothing
            found = [check for check in found if check.name == "answers" and check.status == "ok"]
        return not is_bad and any(check.status in ("ok", "warning") for check in found)

    @property
    def result(self) -> Literal["passed", "partial", "failed"]:
        return "failed" if self.failed else "partial" if self.not_proved else "passed"

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.status == "failed")

    def count(self, status: Status) -> int:
        return sum(check.status == status for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {"format": 1, "passed": self.passed, "result": self.result, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class _Stored(Certificate):
    """The content of the file."""

    format: Literal[1] = 1
    passed: bool = False
    result: Literal["passed", "partial", "failed"] = (
        "failed"  # a default, because `Certificate` has a property of this name
    )
    digest: Digest = ""


def write_certificate(certificate: Certificate, folder: Path) -> Path:
    facts = json.loads(json.dumps(certificate.to_dict(), allow_nan=False))
    text = json.dumps({**facts, "digest": json_digest(facts)}, indent=1, allow_nan=False) + "\n"
    try:
        write_file(folder / FILE, text)
    except OSError as error:
        raise TrilloraError(
            f"The certificate cannot be written: {error.strerror}.",
            where=str(folder / FILE),
            do="free disk space, or make the folder writable",
        ) from error
    return folder / FILE


def read_certificate(folder: Path) -> Certificate:
    """The certificate in a folder. Its types and sizes are checked, and its own digest."""
    file = folder / FILE
    if not file.is_file():
        raise TrilloraError(
            "There is no certificate here.", where=str(file), do=f"make one first: trillora certify {folder}"
        )
    raw = read_json(file, dict[str, Any], do=DO, max_bytes=MAX_BYTES)
    stored = read_json(file, _Stored, do=DO, max_bytes=MAX_BYTES)
    digest = raw.pop("digest")
    if json_digest(raw) != digest:
        raise TrilloraError("The certificate has changed since it was written.", where=str(file), do=DO)
    for each in stored.logits:
        if not len(each.ids) == len(each.trained) == len(each.base) or len(each.stored) not in (0, len(each.ids)):
            raise TrilloraError("The certificate's logits are incomplete.", where=str(file), do=DO)
    names = [field.name for field in dataclasses.fields(Certificate)]
    return Certificate(**{name: getattr(stored, name) for name in names})
