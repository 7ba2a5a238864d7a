"""Measures the recipes of recipes/: writes recipes/results.json, README's table of recipes, and the figures in the head
of each recipe. `make recipes` calls it.

    python tools/recipes.py                              # both parts, all recipes
    python tools/recipes.py --preflight-only             # each at full size on the chips that it is for
    python tools/recipes.py --tiny-only gemma-3-270m-chat
    python tools/recipes.py --add results.json           # what another machine measured with --json results.json
    python tools/recipes.py --table-only                 # only README's table and the heads

Preflight asks the TPU compiler, which exists for x86-64 Linux only; elsewhere it answers with an estimate, which does
not replace an answer of the compiler. It uses no network: a recipe whose data is on the hub is checked with the sample
of `--tiny`, so its memory and step time equal the full run's, and its share of padding is not recorded. A tiny run
is trained in runs/recipes/NAME, where its report stays, and tested on rows that it has not seen.

Each part of each recipe replaces its own entry in the file, so that the parts may come from different machines.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

from claim_records import measured_commit
from sys_scan_findings import scans, write_archive

from trillora.devices.versions import installed_version
from trillora.evaluation.result import LABELS
from trillora.files.atomic import write_file
from trillora.preflight.result import PreflightResult
from trillora.preflight.verdict import preflight
from trillora.recipe import yaml
from trillora.recipe.load import load_recipe
from trillora.recipe.schema import stages_of
from trillora.recipe.tiny import tiny_overrides

ROOT = Path(__file__).resolve().parents[1]
RECIPES, README, RUNS = ROOT / "recipes", ROOT / "README.md", ROOT / "runs" / "recipes"
RESULTS = RECIPES / "results.json"
FINDINGS, NUM_SCANS = RECIPES / "data" / "massive_dataset.tar.gz", 4_000
START, END = "<!-- recipes: start -->", "<!-- recipes: end -->"
PACKAGES = ("trillora", "jax", "jaxlib", "torch", "torchax", "transformers")
TEST_ROWS = 32
WHO = ("base", "adapter")  # before and after
LOG_LINES = 20  # of a run that failed


@dataclass(frozen=True)
class Shown:
    """A recipe of the table: what it does, and the slices that it is for."""

    name: str
    what: str
    slices: tuple[str, ...]

    @property
    def file(self) -> Path:
        return RECIPES / f"{self.name}.yaml"


SHOWN = (
    Shown("sys-scan-mistral-7b", "Mistral-7B assesses security scans", ("v5e-8", "v6e-1")),
    Shown("romanian-mistral-7b", "Mistral-7B learns Romanian: texts, then chats", ("v6e-8",)),
    Shown("gemma-3-270m-chat", "Gemma-3-270M learns your conversations", ("colab",)),
    Shown("qwen3-coder-phases", "Qwen3-0.6B: four adapters in one run, merged", ("kaggle",)),
)
NAMES = tuple(shown.name for shown in SHOWN)


# ---- measuring


def full_size(shown: Shown) -> dict[str, Any]:
    """Preflight of the recipe as it is written, on its slices."""
    sample = sample_data(shown)
    results = preflight(load_recipe(shown.file, sample), shown.slices, use_cache=False)
    versions = {name: version for name, version in results[0].versions.items() if version}
    data = "the sample of --tiny" if sample else "the recipe's own"
    return {**_provenance(versions), "data": data, "slices": [_slice(result, not sample) for result in results]}


def make_findings() -> None:
    """Makes the data of the recipe sys-scan-mistral-7b, if it is missing."""
    if not FINDINGS.exists():
        write_archive(FINDINGS, scans(NUM_SCANS), NUM_SCANS)


def sample_data(shown: Shown) -> dict[str, Any]:
    """The options that replace data of the hub by the sample. Empty for a recipe with local data."""
    stages = [stage.recipe.data.path for stage in stages_of(load_recipe(shown.file))]
    if all(isinstance(path, str) and Path(path).is_absolute() for path in stages):  # local paths are absolute by now
        return {}
    section = yaml.parse(shown.file.read_text("utf-8"), shown.name).get("tiny")
    options = dict(tiny_overrides(section, shown.name))
    chosen = {name: value for name, value in options.items() if "data" in name.split(".")}
    return {name: str(RECIPES / value) if name.endswith("path") else value for name, value in chosen.items()}


def _slice(result: PreflightResult, own_data: bool) -> dict[str, Any]:
    step, run, settings = result.step, result.run, result.settings
    found: dict[str, Any] = {
        "slice": result.slice,
        "method": result.method,
        "verdict": result.verdict,
        "hbm_peak_gib": result.hbm_peak_gib,
        "hbm_limit_gib": result.hbm_limit_gib,
        "changes": {change.option: change.after for change in result.changes},
        "notes": [note for note in result.notes if own_data or not note.startswith("Warning")],  # of the sample's size
    }
    if step and run and settings:
        found |= {"step_seconds": step.seconds, "tokens_per_second": step.tokens_per_second, "hours": run.hours}
        found |= {"fraction_of_peak": step.fraction_of_peak, "num_steps": run.num_steps, "sessions": run.sessions}
        found |= {"weeks": run.weeks, "micro_batch_size": settings.micro_batch_size, "remat": settings.remat}
        found |= {"num_tokens": run.num_tokens, "padding": run.padding} if own_data else {}
    return found


def tiny(shown: Shown) -> dict[str, Any]:
    """The recipe trained with --tiny, and its scores before and after."""
    run = RUNS / shown.name
    shutil.rmtree(run, ignore_errors=True)
    run.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    _trillora(run, "train", str(shown.file), "hardware.backend=cpu", "--tiny", "--out", str(run))
    seconds = round(time.monotonic() - started)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return {
        **_provenance({name: version for name in PACKAGES if (version := installed_version(name))}),
        "machine": f"{os.cpu_count()} cores of {platform.machine()}",
        "seconds": seconds,
        "num_steps": sum(line["kind"] == "step" for line in lines),
        "validation": validation_losses(lines),
        "test": merged_scores(lines) or _tested(shown, run),
    }


def validation_losses(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of every stage or phase, before its first step and after its last one."""
    losses: dict[str, list[float]] = {}
    for line in lines:
        if line["kind"] == "evaluation":
            losses.setdefault(line["stage"], []).append(line["loss"])
    return {stage: {"before": found[0], "after": found[-1]} for stage, found in losses.items()}


def merged_scores(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The base and the merged adapter on the test rows of every phase. Empty for a run without phases."""
    scores = [score for line in lines if line["kind"] == "scores" for score in line["scores"]]
    found: dict[str, Any] = {}
    for score in scores:
        if (who := {"base": "base", "merged": "adapter"}.get(score["adapter"])) is not None:
            found.setdefault(score["phase"], {})[who] = {"loss": score["loss"], "accuracy": score["accuracy"]}
    return found


def _tested(shown: Shown, run: Path) -> dict[str, Any]:
    """`trillora eval` on the test rows of every stage."""
    found = {}
    for stage in stages_of(load_recipe(shown.file, tiny=True)):
        answer = json.loads(_trillora(run, "eval", str(run), "--stage", stage.name, "--rows", str(TEST_ROWS), "--json"))
        scores = {who: {n: round(x, 4) for n, x in answer[who].items() if isinstance(x, float)} for who in WHO}
        found[stage.name] = {"num_rows": answer["num_rows"], "kind": answer["kind"], **scores}
    return found


def _trillora(run: Path, *words: str) -> str:
    """The output of a command. What it shows meanwhile goes to a file next to the run."""
    log = run.with_suffix(".log")
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    with log.open("a") as shown:
        done = subprocess.run(
            [sys.executable, "-m", "trillora", *words], stdout=subprocess.PIPE, stderr=shown, text=True, env=offline
        )
        shown.write(done.stdout)
    if done.returncode != 0:
        last = "\n".join(log.read_text("utf-8").splitlines()[-LOG_LINES:])
        raise RuntimeError(f"trillora {' '.join(words)} ended with exit code {done.returncode}:\n{last}")
    return done.stdout


def _provenance(versions: dict[str, str]) -> dict[str, Any]:
    commit = measured_commit(ROOT, ("recipes", "src/trillora"))
    return {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": commit, "versions": versions}


# ---- the file and the table


def read_results(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text("utf-8"))) if file.exists() else {}


def add_result(results: dict[str, Any], name: str, part: str, found: dict[str, Any]) -> bool:
    """Replaces one part of a recipe. An estimate does not replace what the compiler said."""
    known = results.setdefault(name, {}).get(part)
    if known and part == "preflight" and _methods(found) == {"estimate"} and "compiler" in _methods(known):
        return False
    results[name][part] = found
    return True


def _methods(found: dict[str, Any]) -> set[str]:
    return {place["method"] for place in found["slices"]}


def table(results: dict[str, Any]) -> str:
    """One line per recipe and slice."""
    lines = [
        "| recipe | slice | memory of a device | step | whole run | `--tiny`: on new rows, before → after |",
        "|---|---|---|---|---|---|",
    ]
    for shown in SHOWN:
        measured = results.get(shown.name, {})
        first = f"[{shown.name}](recipes/{shown.name}.yaml): {shown.what}"
        scores = _tiny_cell(measured["tiny"]) if "tiny" in measured else ""
        places = measured.get("preflight", {}).get("slices") or [{"slice": name} for name in shown.slices]
        for place in places:
            lines.append(f"| {first} | {place['slice']} | {' | '.join(_place_cells(place))} | {scores} |")
            first, scores = "", ""
    return "\n".join(lines)


def _place_cells(place: dict[str, Any]) -> tuple[str, str, str]:
    if "step_seconds" not in place:
        return place.get("verdict", ""), "", ""
    changed = ", ".join(f"`{option}={value}`" for option, value in place["changes"].items())
    estimated = " (estimate)" if place["method"] == "estimate" else ""
    memory = f"{place['hbm_peak_gib']:.1f} of {place['hbm_limit_gib']:.1f} GiB{estimated}"
    sessions = f", {place['sessions']} sessions" if place["sessions"] > 1 else ""
    seconds = place["step_seconds"]
    step = f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
    return (
        f"{memory}; with {changed}" if changed else memory,
        f"{step}, {place['tokens_per_second']:,.0f} tokens/s",
        f"{place['num_steps']:,} steps, {_duration(place['hours'])}{sessions}",
    )


def _duration(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1.95 else f"{60 * hours:.0f} min"


def _tiny_cell(found: dict[str, Any]) -> str:
    """The loss: of the last stage, or the mean over the phases. And what the answers are judged by."""
    tests = list(found["test"].values())
    if len(tests) > 1 and "kind" not in tests[0]:
        losses = [mean(test[who]["loss"] for test in tests) for who in WHO]
        return f"mean loss {losses[0]:.2f} → {losses[1]:.2f}"
    base, adapter = tests[-1]["base"], tests[-1]["adapter"]
    names = {"json": ("right_fields", "exact_match"), "short": ("exact_match", "chrf"), "long": ("chrf",)}
    scores = "".join(
        f", {LABELS[name]} {base[name]:.0%} → {adapter[name]:.0%}".replace("%", " %")
        for name in names.get(tests[-1]["kind"], ("accuracy",))
        if name in base and name in adapter
    )
    return f"loss {base['loss']:.2f} → {adapter['loss']:.2f}{scores}"


def figures(measured: dict[str, Any]) -> list[str]:
    """The lines of a recipe's head that say what was measured."""
    lines = []
    if full := measured.get("preflight"):
        by = f"libtpu {libtpu}" if (libtpu := full["versions"].get("libtpu")) else "without the compiler"
        for place in full["slices"]:
            memory, step, run = _place_cells(place)
            lines.append(f"# Preflight, {place['slice']}: {memory}; {step}; {run} ({by}, {full['date']}).")
    if small := measured.get("tiny"):
        run = f"{small['num_steps']} steps in {_duration(small['seconds'] / 3600)} on {small['machine']}"
        lines.append(f"# Tiny run: {_tiny_cell(small)}; {run} ({small['date']}).")
    return lines


def with_figures(text: str, lines: Sequence[str]) -> str:
    """A recipe with these figures, at the end of its head."""
    old = text.splitlines(keepends=True)
    kept = [line for line in old if not line.startswith(("# Preflight, ", "# Tiny run: "))]
    start = next(number for number, line in enumerate(kept) if not line.startswith("#"))
    return "".join([*kept[:start], *(f"{line}\n" for line in lines), *kept[start:]])


def write_texts(results: dict[str, Any]) -> None:
    text = README.read_text("utf-8")
    before, after = text.partition(START)[0], text.partition(END)[2]
    write_file(README, f"{before}{START}\n{table(results)}\n{END}{after}")
    for shown in SHOWN:
        recipe = shown.file.read_text("utf-8")
        write_file(shown.file, with_figures(recipe, figures(results.get(shown.name, {}))))


# ---- the command


def _measured(part: str, name: str) -> dict[str, Any]:
    shown = SHOWN[NAMES.index(name)]
    return full_size(shown) if part == "preflight" else tiny(shown)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the recipes, and write README's table of recipes.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these: {', '.join(NAMES)}")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--preflight-only", action="store_const", const=("preflight",), dest="parts")
    only.add_argument("--tiny-only", action="store_const", const=("tiny",), dest="parts")
    only.add_argument("--table-only", action="store_const", const=(), dest="parts")
    only.add_argument("--add", type=Path, metavar="FILE", help="measure nothing; add the results in this file")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE", help="(default: recipes/results.json)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="recipes at once (default: 1)")
    args = parser.parse_args(arguments)
    if unknown := sorted(set(args.names) - set(NAMES)):
        parser.error(f"there is no recipe {unknown[0]}; there are {', '.join(NAMES)}")
    parts = ("preflight", "tiny") if args.parts is None and args.add is None else args.parts or ()
    if args.add is not None:
        _add(read_results(args.add), args.json)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if "preflight" in parts:
        make_findings()
    num_failed = _measure([(part, name) for part in parts for name in args.names or NAMES], args.json, args.jobs)
    if args.json.resolve() == RESULTS:
        write_texts(read_results(RESULTS))
    return min(num_failed, 1)


def _measure(tasks: list[tuple[str, str]], file: Path, jobs: int) -> int:
    """Runs the tasks, and writes each result as soon as it is there. Returns how many failed."""
    num_failed, started = 0, time.monotonic()
    with ProcessPoolExecutor(max(jobs, 1), mp_context=get_context("spawn")) as pool:
        running = {pool.submit(_measured, *task): task for task in tasks}
        for done in as_completed(running):
            part, name = running[done]
            minutes = (time.monotonic() - started) / 60
            try:
                found = done.result()
            except Exception as error:  # the others continue
                num_failed += 1
                print(f"{name}, {part}: failed after {minutes:.1f} min\n{error}", file=sys.stderr, flush=True)
                continue
            print(f"{name}, {part}: done after {minutes:.1f} min", file=sys.stderr, flush=True)
            _add({name: {part: found}}, file)
    return num_failed


def _add(found: dict[str, Any], file: Path) -> None:
    results = read_results(file)
    for name, parts in found.items():
        for part, measured in parts.items():
            if not add_result(results, name, part, measured):
                print(f"{name}: the TPU compiler's answer stays, an estimate does not replace it", file=sys.stderr)
    write_file(file, json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
