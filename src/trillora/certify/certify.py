"""Certifies an adapter or an export: checks it, and writes `certificate.json` next to it.

    certificate = certify("runs/first")
    certificate.passed
    certificate.failed[0].what       # "12 of 60 arrays differ from the checkpoint of step 84, first …"

Every check is independent: one that fails, or cannot run, does not stop the others.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from trillora.certify.adapter_checks import check_base, check_norms, check_servers, check_trained, layers_of
from trillora.certify.certificate import Certificate, Check, Layer, PromptLogits, read_certificate, write_certificate
from trillora.certify.file_checks import check_files, files_of
from trillora.certify.gguf_file import open_gguf
from trillora.certify.logits import Comparison, Reference, compare, compute_reference
from trillora.certify.readers import Reading, read_with_llama_cpp, read_with_peft, read_with_transformers
from trillora.certify.row_checks import SampleRows, check_masks, check_scores, sample_rows
from trillora.certify.subject import NotHere, Subject, find_subject
from trillora.certify.tokenizer_checks import (
    QUESTION,
    check_gguf_tokenizer,
    check_modelfile,
    check_template_of_run,
    check_tokenizer,
)
from trillora.certify.weight_checks import check_gguf, check_lora_gguf, check_merged, source_of
from trillora.errors import TrilloraError
from trillora.events import Listener, Note, ignore_events
from trillora.export.gguf.write import export_gguf
from trillora.model.adapter_parameters import LORA_B
from trillora.model.loading.tensor_files import opened

T = TypeVar("T")
LIBRARIES = ("jax", "torch", "transformers", "tokenizers", "peft", "gguf", "xllamacpp", "safetensors")
EXACT = 0.02  # largest difference of a log-probability that is no error of structure, for float32 and float16
LEAST = 2e-3  # differences below this are rounding, however small the trained change is
OF_CHANGE = 0.05  # of the trained change
COARSE = 0.1  # mean KL divergence in nats above which the type of a quantized file changes answers
NOTHING = 1e-4  # a change of log-probabilities below this is none


class Findings:
    """Collects checks. An error inside one is its result."""

    def __init__(self) -> None:
        self.checks: list[Check] = []

    def add(self, part: str, name: str, checks: Callable[[], Iterable[Check]]) -> bool:
        """Runs checks and returns whether none failed. `part` and `name` are those of an error."""
        before = len(self.checks)
        try:
            for check in checks():
                self.checks.append(check)
        except NotHere as error:
            self.checks.append(Check(part, name, "skipped", error.what, do=error.do))
        except TrilloraError as error:
            where = f" ({error.where})" if error.where else ""
            self.checks.append(Check(part, name, "failed", f"{error.what}{where}"[:2000], do=error.do))
        return all(check.status != "failed" for check in self.checks[before:])


def certify(
    target: str | Path, *, run: Path | None = None, base: str | None = None, listener: Listener = ignore_events
) -> Certificate:
    """`target` is a run, an adapter, an export of any kind, or a GGUF file. `run` is what an export was made from, if
    that is not the run around it. `base` is the base model, if it is not the one that the run or adapter names."""
    start = time.monotonic()
    subject, findings = find_subject(target, run, base), Findings()
    listener(Note(f"Certifying {subject.kind} {subject.folder}"))
    files = files_of(subject.folder)
    is_whole = findings.add("files", "files", lambda: check_files(subject, files))
    findings.add("trained", "base weights", lambda: check_base(subject))
    rows = _rows(subject, findings, listener)
    reference = _reference(subject, rows, findings, listener)
    layers = _check_kind(subject, reference, findings, listener) if is_whole else ()
    if subject.kind == "adapter":
        findings.add("scores", "loss", lambda: check_scores(subject, reference.rows if reference else None))
    certificate = Certificate(
        kind=subject.kind,
        target=str(target),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=versions(),
        base=_or_none(lambda: subject.opened.base_name),
        base_digest=_or_none(lambda: subject.base_digest),
        trained=_or_none(lambda: subject.trained.source) or "not known",
        trained_digest=_or_none(lambda: subject.trained.digest),
        files=files,
        checks=tuple(findings.checks),
        logits=reference.logits if reference else (),
        layers=layers,
        seconds=round(time.monotonic() - start, 1),
    )
    write_certificate(certificate, subject.folder)
    return certificate


def _check_kind(
    subject: Subject, reference: Reference | None, findings: Findings, listener: Listener
) -> tuple[Layer, ...]:
    """The checks of one kind of export."""
    layers: tuple[Layer, ...] = ()
    if subject.kind == "adapter":
        is_same = findings.add("trained", "weights", lambda: check_trained(subject))
        is_confirmed = is_same and bool(_or_none(lambda: subject.trained.is_from_run))
        layers = check_layers(subject, findings, None, is_confirmed=is_confirmed)
        findings.add("servers", "servers", lambda: check_servers(subject))
    if subject.kind in ("adapter", "merged"):
        findings.add("tokenizer", "tokenizer", lambda: check_tokenizer(subject))
        findings.add("tokenizer", "template of the recipe", lambda: check_template_of_run(subject))
    if subject.kind == "merged":
        findings.add("trained", "tensors", lambda: check_merged(subject, listener))
    if subject.kind in ("gguf", "ollama", "lora-gguf"):
        model = open_gguf(gguf_of(subject))
        if subject.kind == "lora-gguf":
            findings.add("trained", "tensors", lambda: check_lora_gguf(subject, model))
        else:
            findings.add("trained", "tensors", lambda: check_gguf(subject, model, listener))
            findings.add("tokenizer", "tokenizer", lambda: check_gguf_tokenizer(subject, model))
    if subject.kind == "ollama":
        findings.add("servers", "Modelfile", lambda: check_modelfile(subject))
    if reference is not None:
        listener(Note(f"Reading it with {reader_name(subject)}"))
        findings.add("reader", reader_name(subject), lambda: check_reader(subject, reference.logits))
    return layers


def check_layers(
    subject: Subject, findings: Findings, known: dict[str, float] | None, *, is_confirmed: bool
) -> tuple[Layer, ...]:
    found: list[Layer] = []

    def checks() -> Iterator[Check]:
        found.extend(layers_of(subject, known))
        yield from check_norms(subject, tuple(found), is_confirmed=is_confirmed)

    findings.add("norms", "norms", checks)
    return tuple(found)


def _rows(subject: Subject, findings: Findings, listener: Listener) -> SampleRows | None:
    if subject.kind != "adapter":
        return None
    found: list[SampleRows] = []

    def checks() -> Iterator[Check]:
        found.append(sample_rows(subject, listener))
        yield from check_masks(found[0])

    findings.add("masks", "answers", checks)
    return found[0] if found else None


def _reference(subject: Subject, rows: SampleRows | None, findings: Findings, listener: Listener) -> Reference | None:
    """The logits of what was trained: from the certificate of the run's adapter, if that is for the same weights and
    the same base; else computed."""
    found: list[Reference] = []

    def checks() -> Iterator[Check]:
        known = _known_logits(subject)
        found.append(Reference(known) if known else compute_reference(subject, rows.scored if rows else (), listener))
        logits = found[0].logits
        change = max(float(abs(np.subtract(each.trained, each.base)).max()) for each in logits)
        if change < NOTHING:
            what = "The trained weights change no log-probability of the fixed prompts: they equal the base."
            do = "train for more steps, or with a higher learning rate"
            yield Check("trained", "change", "failed", what, change, NOTHING, do)
        else:
            what = f"Training changed log-probabilities of the fixed prompts by up to {change:.3g}."
            yield Check("trained", "change", "ok", what, change, NOTHING)

    findings.add("trained", "change", checks)
    return found[0] if found else None


def _known_logits(subject: Subject) -> tuple[PromptLogits, ...]:
    if subject.adapter is None:
        return ()
    try:
        known = read_certificate(subject.adapter)
    except TrilloraError:
        return ()
    is_same = (known.trained_digest, known.base_digest) == (subject.trained.digest, subject.base_digest)
    return known.logits if is_same and subject.trained.is_from_run else ()


# ---- readers


def reader_name(subject: Subject) -> str:
    return {"adapter": "PEFT", "merged": "transformers"}.get(subject.kind, "llama.cpp")


def check_reader(subject: Subject, logits: tuple[PromptLogits, ...]) -> Iterator[Check]:
    """Reads it with others' code, and compares the logits with those of what was trained."""
    prompts, name = [each.tokens for each in logits], reader_name(subject)
    if subject.kind == "lora-gguf":
        reading, stored = _read_lora(subject, prompts), "F32"
    elif subject.kind == "adapter":
        reading = read_with_peft(subject.opened.folder, subject.folder, prompts)
        stored = "F32"
    elif subject.kind == "merged":
        reading, stored = read_with_transformers(subject.folder, prompts), stored_type(subject.folder)
    else:
        model = open_gguf(gguf_of(subject))
        stored = most_common(list(model.types.values()))
        chats = [[{"role": "user", "content": QUESTION}]] if model.text("tokenizer.chat_template") else []
        size = len(model.value("tokenizer.ggml.tokens") or ())
        reading, rendered = read_with_llama_cpp(model.file, prompts, size, chats=chats)
        if rendered:
            yield from _same_chat(subject, rendered[0])
    yield from uses_all_arrays(name, reading)
    yield _close(name, compare(logits, reading.logprobs), stored)
    yield from _warnings(name, reading)


def _read_lora(subject: Subject, prompts: Sequence[Sequence[int]]) -> Reading:
    """llama.cpp adds the adapter to the base, which is written as GGUF in float32 for this."""
    source = source_of(subject)
    nothing = {name: array * (not name.endswith(LORA_B.suffix)) for name, array in source.matrices.items()}
    with tempfile.TemporaryDirectory() as folder:
        base = export_gguf(dataclasses.replace(source, matrices=nothing), Path(folder) / "base", type="f32")
        size = subject.opened.config.get_text_config().vocab_size
        return read_with_llama_cpp(base.folder / base.files[0], prompts, size, lora=gguf_of(subject))[0]


def uses_all_arrays(name: str, reading: Reading) -> Iterator[Check]:
    """Whether the reader uses every array of the file. One that it leaves out may change the logits too little."""
    if reading.lost:
        num_lost, num_arrays = len(reading.lost), reading.num_arrays
        what = f"{name} does not use {num_lost:,} of the {num_arrays:,} arrays as stored, first {reading.lost[0]}."
        do = "write the adapter again with this version: continue the run, or merge again; or use --to merged"
        yield Check("reader", "arrays", "failed", what, num_lost, 0, do)
    elif reading.num_arrays:
        yield Check("reader", "arrays", "ok", f"{name} uses all {reading.num_arrays:,} arrays of the file.", 0, 0)


def _close(name: str, found: Comparison, stored: str) -> Check:
    figures = (
        f"{name} reads it ({stored}): log-probabilities differ by at most {found.difference:.2g} from what was trained "
        f"(KL {found.divergence:.2g}); training changed them by {found.change:.2g}"
    )
    if found.change >= NOTHING and found.from_base <= 0.02 * found.change:
        do = "export it again: the adapter is not in it"
        return Check("reader", name, "failed", f"{name} reads the base model: the adapter has no effect.", 0, None, do)
    if stored in ("F32", "F16"):
        limit = min(EXACT, max(LEAST, OF_CHANGE * found.change))
        if found.difference <= limit:
            return Check("reader", name, "ok", f"{figures}.", found.difference, limit)
        do = "export it again; if the tensors are right, this is an error of structure: report it"
        return Check("reader", name, "failed", f"{figures}, and the limit is {limit:.2g}.", found.difference, limit, do)
    # A rounded type has no limit that fits all models. Its tensors were compared one by one.
    if found.divergence > COARSE:
        what = f"{figures}. {stored} rounds so coarsely for this model that its answers change."
        do = "use a finer type, such as --type q8_0, or compare the answers before you use this one"
        return Check("reader", name, "warning", what, found.divergence, COARSE, do)
    return Check("reader", name, "ok", f"{figures}. {stored} rounds: its tensors are the proof.", found.divergence)


def _same_chat(subject: Subject, rendered: list[int]) -> Iterator[Check]:
    expected = subject.prompts.encode(QUESTION)
    if rendered == expected:
        what = f"llama.cpp writes a conversation in the same {len(expected)} tokens as training."
        yield Check("tokenizer", "conversation", "ok", what, 0, 0)
        return
    at = next((i for i, (a, b) in enumerate(zip(rendered, expected, strict=False)) if a != b), len(expected))
    what = (
        f"llama.cpp writes a conversation in {len(rendered)} tokens, training in {len(expected)}; they differ from "
        f"token {at + 1} on: {rendered[at : at + 4]} instead of {expected[at : at + 4]}."
    )
    do = "compare add_bos_token, the chat template and the special tokens of the GGUF file with those of the base"
    yield Check("tokenizer", "conversation", "failed", what, do=do)


def _warnings(name: str, reading: Reading) -> Iterator[Check]:
    if reading.warnings:
        texts = list(dict.fromkeys(reading.warnings))
        what = f"{name} warns: {texts[0][:300]}" + (f" (and {len(texts) - 1} more)" if len(texts) > 1 else "")
        yield Check("reader", f"warnings of {name}", "warning", what, len(texts), 0)


def gguf_of(subject: Subject) -> Path:
    return sorted(subject.folder.glob("*.gguf"))[0]


def stored_type(folder: Path) -> str:
    """The most common type of a folder's tensors."""
    types = []
    for file in sorted(folder.glob("*.safetensors")):
        with opened(file) as tensors:
            types += [str(tensors.get_slice(name).get_dtype()) for name in tensors.keys()]  # noqa: SIM118
    return most_common(types)


def most_common(values: list[str]) -> str:
    """Norms are float32 in every GGUF file, so that one counts only if there is no other."""
    others = [value for value in values if value != "F32"] or ["F32"]
    return max(set(others), key=others.count)


def versions() -> dict[str, str]:
    from trillora.version import __version__

    found = {"trillora": __version__}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _or_none(value: Callable[[], T]) -> T | None:
    try:
        return value()
    except TrilloraError:
        return None
