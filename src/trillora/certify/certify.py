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

from trillora.certify.adapter_checks import check_base, check_norms, check_trained, layers_of
from trillora.certify.certificate import (
    CHANGED_ROWS,
    Certificate,
    Check,
    FileFacts,
    Layer,
    PromptLogits,
    read_certificate,
    write_certificate,
)
from trillora.certify.content_checks import (
    check_contents,
    check_header,
    check_lora_header,
    check_modelfile_text,
    nothing_else,
)
from trillora.certify.file_checks import check_files, files_of, only_files
from trillora.certify.logits import ReaderDifference, Reference, compare, compute_reference, with_stored
from trillora.certify.readers import Reading, read_with_llama_cpp, read_with_peft, read_with_transformers
from trillora.certify.row_checks import Changed, SampleRows, check_masks, check_scores, sample_rows
from trillora.certify.subject import NotHere, Subject, find_subject
from trillora.certify.tokenizer_checks import (
    QUESTION,
    check_gguf_tokenizer,
    check_modelfile,
    check_template_of_run,
    check_tokenizer,
)
from trillora.certify.weights.checks import (
    check_gguf,
    check_lora_gguf,
    check_merged,
    planned_gguf,
    tensors_of,
)
from trillora.certify.weights.rounded_model import write_float32_copy, write_rounded
from trillora.errors import TrilloraError
from trillora.events import Listener, Note, ignore_events
from trillora.export.gguf.write import export_gguf
from trillora.model.adapter_parameters import LORA_B

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
        """Runs checks and returns whether none failed. `part` and `name` describe the check that an error replaces."""
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
    findings.add("files", "only files", lambda: only_files(subject.folder))
    findings.add("trained", "base weights", lambda: check_base(subject))
    rows = _rows(subject, findings, listener)
    reference = _reference(subject, rows, findings, listener)
    if reference is not None and is_whole:
        reference = _as_stored(subject, reference, findings, listener)
    layers = _check_kind(subject, files, reference, findings, listener) if is_whole else ()
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
    subject: Subject,
    files: dict[str, FileFacts],
    reference: Reference | None,
    findings: Findings,
    listener: Listener,
) -> tuple[Layer, ...]:
    """The checks of one kind of export."""
    layers: tuple[Layer, ...] = ()
    if subject.kind == "adapter":
        is_same = findings.add("trained", "weights", lambda: check_trained(subject))
        is_confirmed = is_same and bool(_or_none(lambda: subject.trained.is_from_run))
        layers = check_layers(subject, findings, None, is_confirmed=is_confirmed)
    if subject.kind in ("adapter", "merged"):
        findings.add("contents", "files", lambda: check_contents(subject, files))
        findings.add("tokenizer", "tokenizer", lambda: check_tokenizer(subject))
        findings.add("tokenizer", "template of the recipe", lambda: check_template_of_run(subject))
    else:
        findings.add("contents", "nothing else", lambda: [nothing_else(subject, files, {})])
    if subject.kind == "merged":
        findings.add("trained", "tensors", lambda: check_merged(subject, listener))
    if subject.kind == "lora-gguf":
        model = subject.gguf
        findings.add("contents", "header", lambda: check_lora_header(subject, model))
        findings.add("trained", "tensors", lambda: check_lora_gguf(subject, model))
    if subject.kind in ("gguf", "ollama"):
        _check_gguf(subject, findings, listener)
    if subject.kind == "ollama":
        findings.add("servers", "Modelfile", lambda: check_modelfile(subject))
        findings.add("contents", "Modelfile", lambda: check_modelfile_text(subject, subject.gguf_path.name))
    if reference is not None:
        listener(Note(f"Reading it with {reader_name(subject)}"))
        findings.add("reader", reader_name(subject), lambda: check_reader(subject, reference.logits))
    return layers


def _check_gguf(subject: Subject, findings: Findings, listener: Listener) -> None:
    model = subject.gguf

    def checks() -> Iterator[Check]:
        plan = planned_gguf(subject, model)
        yield from check_header(model.header(), plan.values)
        yield from check_gguf(subject, model, plan, listener)

    findings.add("trained", "tensors", checks)
    findings.add("tokenizer", "tokenizer", lambda: check_gguf_tokenizer(subject, model))


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
        try:
            found.append(sample_rows(subject, listener))
        except Changed as error:
            yield Check(*CHANGED_ROWS, "warning", error.what, do=error.do or "")
            return
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


def _as_stored(subject: Subject, reference: Reference, findings: Findings, listener: Listener) -> Reference | None:
    """With the logits of the weights as the export rounds them; None if these cannot be computed."""
    if stored_type(subject) == "F32":
        return reference
    found: list[Reference] = []

    def checks() -> Iterator[Check]:
        with tempfile.TemporaryDirectory() as folder:
            write_rounded(subject, Path(folder), listener)
            found.append(dataclasses.replace(reference, logits=with_stored(reference.logits, Path(folder), listener)))
        yield from ()

    findings.add("reader", reader_name(subject), checks)
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
    """Reads it with others' code, and compares the logits with our engine's, on the weights as they are stored."""
    prompts, name = [each.tokens for each in logits], reader_name(subject)
    stored, exact = stored_type(subject), None
    if subject.kind == "lora-gguf":
        reading = _read_lora(subject, prompts)
    elif subject.kind == "adapter":
        reading = read_with_peft(subject.opened.folder, subject.folder, prompts, subject.opened.rope)
    elif subject.kind == "merged":
        reading = read_with_transformers(subject.folder, prompts)
    else:
        model = subject.gguf
        chats = [[{"role": "user", "content": QUESTION}]] if model.text("tokenizer.chat_template") else []
        size = len(model.value("tokenizer.ggml.tokens") or ())
        reading, rendered = read_with_llama_cpp(model.file, prompts, size, chats=chats)
        if rendered:
            yield from _same_chat(subject, rendered[0])
        if stored != "F32":  # llama.cpp rounds activations too, but not with weights in float32
            with tempfile.TemporaryDirectory() as folder:
                copy = write_float32_copy(model, Path(folder))
                exact = read_with_llama_cpp(copy, prompts, size)[0]
    yield from uses_all_arrays(name, reading)
    in_float32 = None if exact is None else compare(logits, exact.logprobs)
    yield from _close(name, compare(logits, reading.logprobs), in_float32, stored)
    yield from _warnings(name, reading)


def _read_lora(subject: Subject, prompts: Sequence[Sequence[int]]) -> Reading:
    """llama.cpp adds the adapter to the base, which is written as GGUF in float32 for this."""
    source = subject.source
    nothing = {name: array * (not name.endswith(LORA_B.suffix)) for name, array in source.matrices.items()}
    with tempfile.TemporaryDirectory() as folder:
        base = export_gguf(dataclasses.replace(source, matrices=nothing), Path(folder) / "base", type="f32")
        size = subject.opened.config.get_text_config().vocab_size
        return read_with_llama_cpp(base.folder / base.files[0], prompts, size, lora=subject.gguf_path)[0]


def uses_all_arrays(name: str, reading: Reading) -> Iterator[Check]:
    """Whether the reader uses every array of the file. One that it leaves out may change the logits too little."""
    if reading.lost:
        num_lost, num_arrays = len(reading.lost), reading.num_arrays
        what = f"{name} does not use {num_lost:,} of the {num_arrays:,} arrays as stored, first {reading.lost[0]}."
        do = "write the adapter again with this version: continue the run, or merge again; or use --to merged"
        yield Check("reader", "arrays", "failed", what, num_lost, 0, do)
    elif reading.num_arrays:
        yield Check("reader", "arrays", "ok", f"{name} uses all {reading.num_arrays:,} arrays of the file.", 0, 0)


def _close(name: str, found: ReaderDifference, exact: ReaderDifference | None, stored: str) -> Iterator[Check]:
    """`exact` is the comparison of the same weights in float32, if the reader computes with rounded ones."""
    if found.change >= NOTHING and found.from_base <= 0.02 * found.change:
        do = "export it again: the adapter is not in it"
        yield Check("reader", name, "failed", f"{name} reads the base model: the adapter has no effect.", 0, None, do)
        return
    difference = (exact or found).difference
    as_read = f"{stored}, computed in float32" if exact else stored
    figures = (
        f"{name} reads it ({as_read}): log-probabilities differ by at most {difference:.2g} from our engine's with the "
        f"same weights; training changed them by {found.change:.2g}"
    )
    limit = min(EXACT, max(LEAST, OF_CHANGE * found.change))
    if difference <= limit:
        yield Check("reader", name, "ok", f"{figures}.", difference, limit)
    else:
        do = "export it again; if the tensors are right, this is an error of structure: report it"
        yield Check("reader", name, "failed", f"{figures}, and the limit is {limit:.2g}.", difference, limit, do)
    if stored != "F32" and found.divergence > COARSE:
        what = (
            f"The KL divergence from the trained model is {found.divergence:.2g}: {stored} rounds so coarsely for this "
            "model that its answers change."
        )
        do = "use a finer type, such as --type q8_0, or compare the answers before you use this one"
        yield Check("reader", "rounding", "warning", what, found.divergence, COARSE, do)


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
    do = "compare add_bos_token, the chat template and the special tokens of the GGUF file with the base's"
    yield Check("tokenizer", "conversation", "failed", what, do=do)


def _warnings(name: str, reading: Reading) -> Iterator[Check]:
    if reading.warnings:
        texts = list(dict.fromkeys(reading.warnings))
        what = f"{name} warns: {texts[0][:300]}" + (f" (and {len(texts) - 1} more)" if len(texts) > 1 else "")
        yield Check("reader", f"warnings of {name}", "warning", what, len(texts), 0)


def stored_type(subject: Subject) -> str:
    """The type of most tensors that an export rounds; F32 if it rounds none."""
    if subject.kind == "merged":
        return most_common([tensor.type for tensor in tensors_of(subject.folder).values()])
    if subject.kind in ("gguf", "ollama"):
        return most_common(list(subject.gguf.types.values()))
    return "F32"


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
