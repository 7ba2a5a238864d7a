"""How long a run takes from the start of the process to its first step, and from its last step to the end.

    python benchmarks/start.py                                     # SmolLM2, which is embedded, on any backend
    python benchmarks/start.py --json start.json engine.layers=unroll train.steps=4

Trains twice, in processes of their own: cold, with an empty program cache, and warm, with what the first run left in
it. Each line of a timeline begins when the run reports something, and ends when it reports the next thing; short ones
are joined. `trace`, `lower`, `compile` and `cached` are seconds that jax spent on programs meanwhile, in all threads:
Python to jaxpr, jaxpr to MLIR, the compiler including its cache, and of this reading the cache. The table at the end
compares both starts. There, `compile` is what a start would take that does everything else at the same time, if its
programs were compiled one after another.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import Any

from record import MODEL_CODE, add_record_option, record_if

from trillora.files.cache_dir import cache_root

RECIPE = """\
model: smollm2
data: {path: train.jsonl, split: {validation: 0.05}}
lora: {rank: 16, alpha: 32}
train: {sequence_length: 512, batch_size: 4, steps: 8, learning_rate: 1.0e-3, warmup_steps: 2}
evaluate: {num_samples: 2, max_tokens: 32, every_steps: 1000}
hardware: {devices: 1}
"""
SOURCES = ("benchmarks/start.py", "src/trillora/training", "src/trillora/data", *MODEL_CODE)
NUM_ROWS = 400  # of the quickstart's data
SHORT = 0.3  # seconds; a shorter line of the timeline is joined with the next one
JAX_EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
    "/jax/compilation_cache/cache_retrieval_time_sec": "cached",
}
COLUMNS = ("trace", "lower", "compile", "cached")
Timeline = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="options of the recipe")
    parser.add_argument("--starts", nargs="*", default=["cold", "warm"], help="names; the first has an empty cache")
    parser.add_argument("--json", type=Path, help="also write the timelines to this file")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    add_record_option(parser)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(measure(args.child, args.overrides)), flush=True)
        return
    found = {}
    with tempfile.TemporaryDirectory() as work:
        write_recipe(Path(work))
        link_caches(Path(work) / "cache")
        for name in args.starts:
            found[name] = in_child(Path(work), name, args.overrides)
            print(f"\n{name}: {found[name]['summary']['whole run']:.1f} s\n{show_timeline(found[name]['timeline'])}")
    print(f"\n{found_on(next(iter(found.values())))}\n\n{table(found)}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    where = "cpu" if "cpu" in next(iter(found.values()))["device"].lower() else "gpu"
    record_if(args.record, f"start-{where}", {name: one["summary"] for name, one in found.items()}, SOURCES)


def write_recipe(folder: Path) -> None:
    rows = (resources.files("trillora.quickstart") / "data" / "train.jsonl").read_text("utf-8").splitlines(True)
    (folder / "train.jsonl").write_text("".join(rows[:NUM_ROWS]))
    (folder / "recipe.yaml").write_text(RECIPE)


def link_caches(folder: Path) -> None:
    """Only the programs have an empty cache. The embedded model is converted once per machine: if that has not happened
    yet, the first start does it, and its timeline shows it."""
    folder.mkdir()
    for path in cache_root().iterdir() if cache_root().is_dir() else ():
        if path.name != "programs":
            (folder / path.name).symlink_to(path)


def in_child(folder: Path, name: str, overrides: list[str]) -> dict[str, Any]:
    """One run in a process of its own."""
    environment = {**os.environ, "TRILLORA_CACHE": str(folder / "cache"), "START_OUT": str(folder / name)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, __file__, "--child", str(time.time()), *overrides]
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"The {name} start failed with exit code {done.returncode}.")
    ended = time.time() - float(command[3])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["summary"]["end of the process"] = ended - found["summary"]["whole run"]
    return found


def measure(started: float, overrides: list[str]) -> dict[str, Any]:
    """Trains in this process, which the parent started at `started`."""
    reports: list[tuple[float, str, Any]] = [(0.0, "Python", None)]
    programs: list[tuple[float, str, float, str]] = []

    def report(label: str, event: Any = None) -> None:
        if label != reports[-1][1]:  # on stderr as it happens, in case the time runs out
            print(f"{time.time() - started:7.1f}  {label[:100]}", file=sys.stderr, flush=True)
        reports.append((time.time() - started, label, event))

    report("imports")
    from trillora.cli import GARBAGE_THRESHOLD  # what the command line does first
    from trillora.devices.quiet import quiet_libraries, start_gpu
    from trillora.events import Step
    from trillora.recipe.load import load_recipe

    gc.set_threshold(GARBAGE_THRESHOLD)
    recipe = load_recipe(Path("recipe.yaml"), overrides)
    quiet_libraries(recipe.hardware.backend)
    start_gpu(recipe.hardware.backend)
    from trillora.training.trainer import train

    report("start of the trainer")
    import jax

    def on_program(event: str, seconds: float, **details: Any) -> None:
        if kind := JAX_EVENTS.get(event):
            programs.append((time.time() - started, kind, seconds, str(details.get("fun_name", ""))))

    jax.monitoring.register_event_duration_secs_listener(on_program)
    train(recipe, Path(os.environ["START_OUT"]), listener=lambda event: report(describe(event), event))
    report("end")
    steps = [at for at, _, event in reports if isinstance(event, Step)]
    seconds = {kind: sum(s for _, k, s, _ in programs if k == kind) for kind in COLUMNS}
    return {
        "summary": {
            "imports": reports[2][0],
            "to the first step": steps[0],
            "other steps": steps[-1] - steps[0],
            "after the last step": reports[-1][0] - steps[-1],
            "whole run": reports[-1][0],
            **seconds,
            "programs": sum(kind == "lower" for _, kind, _, _ in programs),
        },
        "timeline": timeline(reports, programs),
        "largest": sorted(([kind, name, round(s, 2)] for _, kind, s, name in programs), key=lambda row: -row[2])[:40],
        "device": jax.devices()[0].device_kind,
        "versions": {name: sys.modules[name].__version__ for name in ("jax", "torch", "transformers")},
    }


def describe(event: Any) -> str:
    kind = type(event).__name__
    if kind == "Step":
        return "step"
    return str(getattr(event, "text", None) or getattr(event, "label", None) or getattr(event, "path", None) or kind)


def timeline(reports: list[tuple[float, str, Any]], programs: list[tuple[float, str, float, str]]) -> Timeline:
    """Neighboring lines with one label are joined, and so are short ones."""
    lines: Timeline = []
    for (begin, label, _), (end, _, _) in itertools.pairwise(reports):
        if lines and (lines[-1]["label"] == label or lines[-1]["end"] - lines[-1]["begin"] < SHORT):
            lines[-1] |= {"end": end, "label": label}
        else:
            lines.append({"begin": begin, "end": end, "label": label})
    for line in lines:
        own = [(kind, seconds) for at, kind, seconds, _ in programs if line["begin"] < at <= line["end"]]
        line |= {kind: sum(seconds for k, seconds in own if k == kind) for kind in COLUMNS}
    return lines


def show_timeline(lines: Timeline) -> str:
    rows = ["  begin seconds  trace  lower compile cached  reported at the beginning"]
    for line in lines:
        parts = " ".join(f"{line[kind]:6.1f}" if line[kind] >= 0.05 else "     -" for kind in COLUMNS)
        rows.append(f"{line['begin']:7.1f} {line['end'] - line['begin']:7.1f} {parts}  {line['label'][:60]}")
    return "\n".join(rows)


def found_on(one: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
    return f"{one['device']}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}"


def table(found: dict[str, dict[str, Any]]) -> str:
    names = list(next(iter(found.values()))["summary"])
    rows = [f"| seconds | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    for name in names:
        form = "{:.0f}" if name == "programs" else "{:.1f}"
        rows.append(f"| {name} | {' | '.join(form.format(one['summary'][name]) for one in found.values())} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
