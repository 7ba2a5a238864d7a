"""Checks every causal LM of transformers that can be built small, and text models inside multimodal ones: `make
architectures` writes benchmarks/results/architectures.json, and from it docs/models.md.

    python tools/architectures.py                 all cases of tests/support/tiny_models.py
    python tools/architectures.py llama gemma2    only these; the others keep their last result
    python tools/architectures.py --resume        only cases without a result of the current code and libraries

tests/support/architecture_checks.py has the checks. Results are stored in .architectures/, one file per case.
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
import re
import sys
import time
from pathlib import Path
from typing import Any

from claim_records import measured_commit

ROOT = Path(__file__).parents[1]
SUPPORT = ROOT / "tests" / "support"
ANSWERS = ROOT / ".architectures"
PAGE = ROOT / "docs" / "models.md"
RECORD = ROOT / "benchmarks" / "results" / "architectures.json"
SOURCES = [
    "src/trillora/engine",
    "src/trillora/model",
    "tests/support/architecture_checks.py",
    "tests/support/tiny_models.py",
]
RAN_ON = re.compile(r"(?P<versions>.*), (?P<machine>\w+), (?P<date>[\d-]+), commit (?P<commit>\S+)")
FAILED = "no: "  # in front of the reason
VERSIONS = ("transformers", "torch", "torchax", "jax", "peft")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names from tests/support/tiny_models.py (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--resume", action="store_true", help="skip cases with a result of the current code")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time; continue with --resume")
    parser.add_argument("--page-only", action="store_true", help="write the page from the record")
    args = parser.parse_args()
    os.environ.update(JAX_PLATFORMS="cpu", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", PYTHONWARNINGS="ignore")
    sys.path.insert(0, str(SUPPORT))
    ANSWERS.mkdir(exist_ok=True)
    import tiny_models

    if args.page_only:
        PAGE.write_text(page(tiny_models), encoding="utf-8")
        return 0
    every_name = [*tiny_models.buildable(), *tiny_models.WRAPPERS]
    names = args.cases or every_name
    if args.resume:
        names = [name for name in names if not _is_current(name)]
    deadline = time.monotonic() + 60 * args.minutes
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
    num_passed, num_cases = write_record(tiny_models)
    PAGE.write_text(page(tiny_models), encoding="utf-8")
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
    commit = measured_commit(
        ROOT, ("src/trillora/engine", "src/trillora/model", "tests/support/architecture_checks.py")
    )
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
    files += [*SUPPORT.glob("tiny_*.py"), SUPPORT / "architecture_checks.py"]
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


def write_record(tiny_models: Any) -> tuple[int, int]:
    """Writes the record of all stored results. Returns how many cases passed, and how many there are."""
    stored = {path.stem: json.loads(path.read_text()) for path in sorted(ANSWERS.glob("*.json"))}
    passed = {name: all(a["passed"] for a in one["answers"].values()) for name, one in stored.items()}
    texts = [name for name in stored if name not in tiny_models.WRAPPERS]
    values = {
        "passed": sum(passed[name] for name in texts),
        "all": len(texts),
        "multimodal": sum(passed.values()) - sum(passed[name] for name in texts),
        "multimodal_all": len(stored) - len(texts),
        "cases": {name: {q: _detail(a) for q, a in one["answers"].items()} for name, one in stored.items()},
    }
    newest = RAN_ON.fullmatch(max((one["ran_on"] for one in stored.values()), key=_date))
    assert newest
    record = {
        "name": RECORD.stem,
        "command": "make architectures",
        "commit": newest["commit"],
        "date": newest["date"],
        "machine": f"CPU ({newest['machine']})",
        "versions": dict(re.findall(r"(\w+) ([\w.+]+)", newest["versions"])),
        "sources": SOURCES,
        "values": values,
    }
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return sum(passed.values()), len(stored)


def _date(ran_on: str) -> str:
    found = RAN_ON.fullmatch(ran_on)
    return found["date"] if found else ""


def _detail(answer: dict[str, Any]) -> str:
    return answer["detail"] if answer["passed"] else f"{FAILED}{_escape(answer['detail'])}"


def page(tiny_models: Any) -> str:
    """docs/models.md, from the record."""
    import architecture_checks

    record = json.loads(RECORD.read_text("utf-8"))
    values, cases, wrappers = record["values"], record["values"]["cases"], tiny_models.WRAPPERS
    failures = [
        f"| {name} | {question} | {detail.removeprefix(FAILED)} |"
        for name, details in cases.items()
        for question, detail in details.items()
        if detail.startswith(FAILED)
    ]
    reasons: dict[str, list[str]] = {}
    for name, reason in sorted(tiny_models.uncovered().items()):
        reasons.setdefault(_escape(reason or "new"), []).append(name)
    return PAGE_TEXT.format(
        **{name: values[name] for name in ("passed", "all", "multimodal", "multimodal_all")},
        versions=", ".join(f"{package} {version}" for package, version in record["versions"].items()),
        made=f"{record['machine']}, {record['date']}, commit {record['commit']}",
        logits=architecture_checks.LOGITS,
        gradients=architecture_checks.GRADIENTS,
        texts="\n".join(
            f"| {name} | {', '.join('MoE' if m == 'mixture' else m for m in tiny_models.CASES[name].mechanisms)} |"
            for name in cases
            if name not in wrappers
        ),
        wrappers=", ".join(f"{name} ({wrappers[name].text})" for name in cases if name in wrappers),
        failures="\n".join(failures),
        not_covered="\n".join(f"| {reason} | {', '.join(names)} |" for reason, names in sorted(reasons.items())),
    )


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:240]


PAGE_TEXT = """# Models

**{passed} of {all} configurations** of causal LMs in transformers pass every check ({versions}; {made}).
`make architectures` checks tiny random float32 models with random LoRA adapters against plain PyTorch:

- logits, and the adapter's gradients, with equal layers in one loop and with every layer separate. The allowed error is
  {logits:g} of the scale of the logits and {gradients:g} of the gradients by autograd;
- two documents packed into one sequence give the same logits as in two sequences;
- hidden states stay bfloat16, with an error like PyTorch's own in bfloat16;
- PEFT reads the adapter from our files, adapters of experts too, and gives the same logits on the original model.

The errors of every check are in [architectures.json](../benchmarks/results/architectures.json).

| model type | what it has |
|---|---|
{texts}

## Text models inside multimodal ones
**{multimodal} of {multimodal_all} families** pass every check: their vision and audio towers are not loaded, and the
text model (in brackets) gives the logits that the whole model gives for text: {wrappers}.

## What fails and why

| model type | check | reason |
|---|---|---|
{failures}

## Causal model types that are not tested

| reason | types |
|---|---|
{not_covered}
"""

if __name__ == "__main__":
    sys.exit(main())
