"""Repeats a certificate: the same files, rules, norms and tokenizer, and the logits by one reader, without the run.

    verify("adapter").passed

It needs the folder, its certificate and, for an adapter, the base model. Our own engine is not used: the certificate
has the logits of what was trained.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

from trillora.certify.certificate import Certificate, Check, read_certificate
from trillora.certify.certify import Findings, check_layers, check_reader, reader_name, versions
from trillora.certify.file_checks import check_files, compare_files, files_of, only_files
from trillora.certify.subject import Subject, Trained, find_subject
from trillora.certify.tokenizer_checks import check_gguf_tokenizer, check_modelfile, check_tokenizer
from trillora.events import Listener, Note, ignore_events
from trillora.model.adapters import load_adapter


def verify(target: str | Path, *, base: str | None = None, listener: Listener = ignore_events) -> Certificate:
    """The result has the checks that were repeated; nothing is written."""
    start = time.monotonic()
    subject = find_subject(target, None, base)
    known = read_certificate(subject.folder)
    if subject.base_id is None:
        subject.base_id = known.base  # used if it is on this machine: nothing is downloaded because a file names it
    findings, files = Findings(), files_of(subject.folder)
    findings.add("files", "certificate", lambda: _of_the_certificate(known))
    findings.add("files", "same as certified", lambda: [compare_files(files, known.files)])
    is_whole = findings.add("files", "files", lambda: check_files(subject, files))
    findings.add("files", "only files", lambda: only_files(subject.folder))
    findings.add("trained", "base weights", lambda: _same_base(subject, known))
    if is_whole:
        _repeat(subject, known, findings, listener)
    return dataclasses.replace(
        known,
        target=str(target),
        versions=versions(),
        files=files,
        checks=tuple(findings.checks),
        seconds=round(time.monotonic() - start, 1),
    )


def _repeat(subject: Subject, known: Certificate, findings: Findings, listener: Listener) -> None:
    if subject.kind == "adapter":
        findings.add("trained", "weights", lambda: _same_weights(subject, known))
        norms = {layer.name: layer.base for layer in known.layers if layer.base is not None}
        check_layers(subject, findings, norms, is_confirmed=not known.failed)
    if subject.kind in ("adapter", "merged"):
        findings.add("tokenizer", "tokenizer", lambda: check_tokenizer(subject))
    if subject.kind in ("gguf", "ollama"):
        findings.add("tokenizer", "tokenizer", lambda: check_gguf_tokenizer(subject, subject.gguf))
    if subject.kind == "ollama":
        findings.add("servers", "Modelfile", lambda: check_modelfile(subject))
    if known.logits:
        listener(Note(f"Reading it with {reader_name(subject)}"))
        findings.add("reader", reader_name(subject), lambda: check_reader(subject, known.logits))


def _of_the_certificate(known: Certificate) -> Iterator[Check]:
    if known.failed:
        names = ", ".join(f"{check.part}: {check.name}" for check in known.failed[:4])
        what = f"The certificate itself says that it failed ({names})."
        yield Check("files", "certificate", "failed", what, len(known.failed), 0, known.failed[0].do)
    else:
        what = f"The certificate of {known.created} passed, and has not changed."
        yield Check("files", "certificate", "ok", what, 0, 0)


def _same_base(subject: Subject, known: Certificate) -> Iterator[Check]:
    if known.base_digest is None:
        yield Check("trained", "base weights", "skipped", "The certificate has no digest of the base.")
    elif subject.base_digest == known.base_digest:
        what = f"{subject.opened.base_name} has the certified digest, {known.base_digest[:12]}…."
        yield Check("trained", "base weights", "ok", what)
    else:
        what = f"The weights of {subject.opened.base_name} are not those that were certified."
        do = "use the revision of the base that was certified; if its files have changed, download them again"
        yield Check("trained", "base weights", "failed", what, do=do)


def _same_weights(subject: Subject, known: Certificate) -> Iterator[Check]:
    assert subject.adapter is not None
    own = Trained(*load_adapter(subject.adapter), "the adapter's own file", False)
    if known.trained_digest is None or own.digest == known.trained_digest:
        yield Check("trained", "weights", "ok", f"Weights and options equal the certified {known.trained}'s.")
    else:
        what = f"Weights or options differ from the certified {known.trained}'s."
        yield Check("trained", "weights", "failed", what, do="restore the adapter that was certified")
