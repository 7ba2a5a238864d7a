"""Checks every causal LM of transformers that can be built small, and text models inside multimodal ones: `make
architectures` writes docs/models.md.

    python tools/architectures.py                 all cases of tests/tiny_models.py
    python tools/architectures.py llama gemma2    only these; the others keep their last result
    python tools/architectures.py --resume        only cases without a result of the current code and libraries

The checks are those of tests/architecture_checks.py. Results are stored in .architectures/, one file per case.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from claim_records import measured_commit

ROOT = Path(__file__).parents[1]
ANSWERS = ROOT / ".architectures"
PAGE = ROOT / "docs" / "models.md"
VERSIONS = ("transformers", "torch", "torchax", "jax", "peft")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names from tests/tiny_models.py (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--resume", action="store_true", help="skip cases with a result of the current code")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time; continue with --resume")
    parser.add_argument("--page-only", action="store_true", help="write the page from the stored results")
    args = parser.parse_args()
    os.environ.update(JAX_PLATFORMS="cpu", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", PYTHONWARNINGS="ignore")
    sys.path.insert(0, str(ROOT / "tests"))
    ANSWERS.mkdir(exist_ok=True)
    import tiny_models

    every_name = [*tiny_models.buildable(), *tiny_models.WRAPPERS]
    names = args.cases or every_name
    if args.resume:
        names = [name for name in names if not _is_current(name)]
    deadline = time.monotonic() + 60 * args.minutes
    if not args.page_only:
        context = multiprocessing.get_context("spawn")  # jax does not survive a fork
        with context.Pool(args.jobs, maxtasksperchild=8) as pool:
            for i, (name, summary) in enumerate(pool.imap_unordered(check_case, names), start=1):
                print(f"{i:3}/{len(names)}  {name:28} {summary}", flush=True)
                if time.monotonic() > deadline:
                    break
    missing = [name for name in every_name if not (ANSWERS / f"{name}.json").exists()]
    if missing:
        print(f"{len(missing)} cases have no result yet, so the page is not written: continue with --resume.")
        return 0
    num_passed, num_cases = write_page(tiny_models)
    print(f"{num_passed} of {num_cases} configurations pass every check; {PAGE.relative_to(ROOT)} written.")
    return 0


def check_case(name: str) -> tuple[str, str]:
    """Runs all checks on one case and stores the results. An exception is a failed check."""
    import architecture_checks
    import jax

    jax.config.update("jax_disable_most_optimizations", True)  # the same arithmetic in a third of the compile time
    started = time.perf_counter()
    answers: dict[str, dict[str, Any]] = {}
    try:
        subject = architecture_checks.Subject(name)
    except Exception as error:
        answers["built"] = {"passed": False, "detail": _first_line(error)}
    else:
        for question, check in architecture_checks.CHECKS.items():
            try:
                answer = check(subject)
                answers[question] = {"passed": answer.passed, "detail": answer.detail}
            except Exception as error:
                answers[question] = {"passed": False, "detail": _first_line(error)}
    jax.clear_caches()
    commit = measured_commit(ROOT, ("src/trillora/engine", "src/trillora/model", "tests/architecture_checks.py"))
    ran_on = f"{_versions()}, {platform.machine()}, {time.strftime('%Y-%m-%d')}, commit {commit}"
    seconds = round(time.perf_counter() - started, 1)
    record = {"seconds": seconds, "ran_on": ran_on, "code": code_fingerprint(), "answers": answers}
    unfinished = ANSWERS / f"{name}.unfinished"  # a run may be stopped at any time
    unfinished.write_text(json.dumps(record, indent=1))
    unfinished.replace(ANSWERS / f"{name}.json")
    failed = {q: a["detail"] for q, a in answers.items() if not a["passed"]}
    return name, f"{record['seconds']:6.1f} s  " + ("pass" if not failed else f"FAIL {failed}")


def _versions() -> str:
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in VERSIONS)


@functools.cache
def code_fingerprint() -> str:
    """Changes with the code that decides the results."""
    folders = [ROOT / "src" / "trillora" / folder for folder in ("model", "engine")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    files += [*(ROOT / "tests").glob("tiny_*.py"), ROOT / "tests" / "architecture_checks.py"]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sorted(files))).hexdigest()[:16]


def _is_current(name: str) -> bool:
    """Whether the stored result of a case comes from the current code and libraries."""
    path = ANSWERS / f"{name}.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    return record.get("code") == code_fingerprint() and record["ran_on"].startswith(_versions())


def _first_line(error: Exception) -> str:
    what = str(error).strip().splitlines() or [""]
    where = next((line.split("where:")[1].strip() for line in what if "where:" in line), "")
    return f"{what[0] or type(error).__name__} {where and f'({where})'}".strip()


def write_page(tiny_models: Any) -> tuple[int, int]:
    import architecture_checks

    questions = list(architecture_checks.CHECKS)
    rows: list[str] = []
    wrappers: list[str] = []
    failures: list[str] = []
    num_passed = num_wrappers = 0
    records = {p.stem: json.loads(p.read_text()) for p in sorted(ANSWERS.glob("*.json"))}
    for name, record in records.items():
        answers = record["answers"]
        passed = all(a["passed"] for a in answers.values())
        cells = " | ".join(_cell(answers.get(q)) for q in questions)
        if (wrapper := tiny_models.WRAPPERS.get(name)) is not None:
            num_wrappers += passed
            wrappers.append(f"| {name} | {wrapper.text} | {cells} |")
        else:
            num_passed += passed
            rows.append(f"| {name} | {', '.join(tiny_models.CASES[name].mechanisms)} | {cells} |")
        reasons: dict[str, list[str]] = {}
        for question, answer in answers.items():
            if not answer["passed"]:
                reasons.setdefault(_escape(answer["detail"]), []).append(question)
        failures += [f"| {name} | {', '.join(failed)} | {reason} |" for reason, failed in reasons.items()]
    not_covered = [
        f"| {name} | {_escape(reason or 'new')} |" for name, reason in sorted(tiny_models.uncovered().items())
    ]
    PAGE.write_text(
        PAGE_TEXT.format(
            num_passed=num_passed,
            num_cases=len(rows),
            num_wrappers_passed=num_wrappers,
            num_wrappers=len(wrappers),
            wrappers="\n".join(wrappers),
            versions="; ".join(sorted({record["ran_on"] for record in records.values()})),
            logits=architecture_checks.LOGITS,
            gradients=architecture_checks.GRADIENTS,
            questions=" | ".join(questions),
            rule="|".join(["---"] * len(questions)),
            rows="\n".join(rows),
            failures="\n".join(failures),
            not_covered="\n".join(not_covered),
        )
    )
    return num_passed + num_wrappers, len(records)


def _cell(answer: dict[str, Any] | None) -> str:
    if answer is None:
        return "-"
    return answer["detail"] if answer["passed"] else "**no**"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:240]


PAGE_TEXT = """# Architectures

**{num_passed} of {num_cases} configurations** of causal LMs in transformers pass every check ({versions}).
Written by `make architectures`: tiny random float32 models with random LoRA adapters, compared with plain PyTorch.
The allowed error is {logits:g} of the scale of the logits and {gradients:g} of autograd's adapter gradients. A segment
`0+6x3` means: starting at layer 0, 6 layers form one traced body, which runs 3 times.

| column | check |
|---|---|
| scanned | equal layers in one loop: error of logits, error of adapter gradients, segments found |
| unrolled | the same with every layer separate |
| packed | two documents in one sequence give the same logits as in two sequences |
| leak seen | control: without segment ids, they do not |
| bfloat16 | hidden states stay bfloat16; error against float32, relative to PyTorch's own bfloat16 error |
| peft | PEFT reads the adapter from our files and gives the same logits on the original model |
| experts | adapters of experts too: error of logits and of adapter gradients against PEFT with our files |

| case | mechanisms | {questions} |
|---|---|{rule}|
{rows}

## Text models inside multimodal ones
**{num_wrappers_passed} of {num_wrappers} families** pass every check: their vision and audio towers are not loaded, and
the text model gives the logits that the whole model gives for text.

| model type | text model | {questions} |
|---|---|{rule}|
{wrappers}

## What fails and why

| case | checks | reason |
|---|---|---|
{failures}

## Causal model types that are not tested

| type | reason |
|---|---|
{not_covered}
"""

if __name__ == "__main__":
    sys.exit(main())
