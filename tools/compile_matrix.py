"""Compiles what users run on TPUs to the end, with the TPU compiler: the matrix of benchmarks/PREFLIGHT.md.

    python tools/compile_matrix.py                     all rows that docs/compile_matrix.jsonl lacks for these versions
    python tools/compile_matrix.py --only gemma        rows whose name contains the word, again
    python tools/compile_matrix.py --plan build/plan   keeps the settings of each row there, and finds them next time
    python tools/compile_matrix.py --table-only        only the table

Rows: the training step of each recipe on its chips and of each shape of benchmarks/tpu_steps.py, with the settings that
preflight chooses (or chose: with --plan, another compiler gets the same program); for each recipe also its evaluation,
and prefill and decode of its answers; the programs of `trillora doctor --prove`. "Compiled" means that an executable
came out. Each row is compiled in a process of its own: a compiler that crashes is a row that failed. Needs libtpu and
therefore x86-64 Linux. The environment decides the versions: `.venv` has the set tpu, `.venv-newest` (`make
compat-newest`) the newest that pip may choose.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]
RECORDS, PAGE = ROOT / "docs" / "compile_matrix.jsonl", ROOT / "benchmarks" / "PREFLIGHT.md"
START, END = "<!-- compile matrix: start -->", "<!-- compile matrix: end -->"
MIB, GIB = 2**20, 2**30
PROVE_ON = ("v5e-1", "v5e-8", "v6e-8")
PROMPT, ANSWER, NUM_PROMPTS = 512, 128, 8  # tokens, tokens; prompts of a batch of the evaluation
TIMEOUT = 3600  # seconds


@dataclass(frozen=True)
class Row:
    """A program, and the slice that it is compiled for."""

    kind: str  # "recipe", "shape" or "prove"
    name: str
    slice: str

    @property
    def key(self) -> str:
        return f"{self.kind} {self.name} {self.slice}"


def all_rows() -> Iterator[Row]:
    from tpu_steps import CASES

    from recipes import SHOWN

    for shown in SHOWN:
        yield from (Row("recipe", shown.name, place) for place in shown.slices)
    for number, case in enumerate(CASES["shapes"]):
        yield Row("shape", f"{number}", case.slices[0])
    yield from (Row("prove", "golden model", place) for place in PROVE_ON)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name contains this, also if they are recorded")
    parser.add_argument("--table-only", action="store_true")
    parser.add_argument("--plan", type=Path, help="folder of settings that preflight chose")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # a row, and what preflight chose, as JSON
    args = parser.parse_args()
    if args.child:
        compile_row(json.loads(args.child))
    if not args.table_only:
        from recipes import make_findings
        from trillora.preflight.client import versions

        found = {name: str(versions()[name]) for name in ("jax", "libtpu", "transformers", "torchax")}
        known = {(r["row"], r["jax"], r["libtpu"]) for r in read_records()}
        rows = [r for r in all_rows() if args.only.lower() in r.key.lower()]
        rows = [r for r in rows if args.only or (r.key, found["jax"], found["libtpu"]) not in known]
        make_findings()
        from transformers import AutoConfig  # noqa: F401, its lazy imports are not safe in threads

        with ThreadPoolExecutor(args.jobs) as pool:
            for row, programs in zip(rows, pool.map(lambda row: attempt(row, args.plan), rows), strict=True):
                record(row, found, programs)
    write_table()
    return 0


def attempt(row: Row, plan: Path | None) -> list[dict[str, Any]]:
    """What came out of the compiler for each program of the row."""
    from trillora.devices.slices import COMPILE_ONLY_ENVIRONMENT
    from trillora.errors import TrilloraError

    print(f"{row.key} …", file=sys.stderr, flush=True)
    try:
        question = planned(row, plan)
    except TrilloraError as error:
        return [{"program": "step", "error": error.what}]
    environment = {**os.environ, **COMPILE_ONLY_ENVIRONMENT, "XLA_FLAGS": ""}
    command = [sys.executable, __file__, "--child", json.dumps(question)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    programs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1][:300]
        programs.append({"program": "step", "error": f"exit code {done.returncode}: {last}"})
    return programs


def record(row: Row, versions: dict[str, str], programs: list[dict[str, Any]]) -> None:
    """Replaces what is recorded about a row with these versions."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    head = {"row": row.key, **versions, "date": datetime.date.today().isoformat(), "commit": commit.stdout.strip()}
    records = [r for r in read_records() if (r["row"], r["jax"], r["libtpu"]) != (row.key, head["jax"], head["libtpu"])]
    with RECORDS.open("w", encoding="utf-8") as file:
        for each in [*records, *({**head, **program} for program in programs)]:
            file.write(json.dumps(each) + "\n")
    for program in programs:
        print(f"{row.key}: {json.dumps(program)}", file=sys.stderr, flush=True)


def planned(row: Row, plan: Path | None) -> dict[str, Any]:
    """What a child needs to compile the row: from the plan, or from preflight."""
    file = plan / f"{row.key.replace(' ', '-')}.json" if plan is not None else None
    if file is not None and file.exists():
        found: dict[str, Any] = json.loads(file.read_text("utf-8"))
        return found
    with tempfile.TemporaryDirectory() as folder:
        question = asked(row, Path(folder))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(question), "utf-8")
    return question


def asked(row: Row, folder: Path) -> dict[str, Any]:
    """By preflight, with the compiler of this environment."""
    if row.kind == "prove":
        return {"kind": "prove", "slice": row.slice}
    from tpu_steps import CASES, recipe

    from recipes import SHOWN, sample_data
    from trillora.events import ignore_events
    from trillora.preflight.inputs import read_inputs
    from trillora.preflight.verdict import preflight
    from trillora.recipe.load import load_recipe

    if row.kind == "recipe":
        [shown] = [each for each in SHOWN if each.name == row.name]
        wanted = load_recipe(shown.file, sample_data(shown))
    else:
        wanted = recipe(CASES["shapes"][int(row.name)], row.slice, folder)
    [result] = preflight(wanted, [row.slice])
    assert result.settings is not None and result.step is not None, result.problem
    inputs = read_inputs(wanted, ignore_events)
    longest = max(inputs.stages, key=lambda stage: stage.sequence_length)
    return {
        "kind": row.kind,
        "slice": row.slice,
        "config": json.loads((inputs.model / "config.json").read_text("utf-8")),
        "stage": longest.recipe.model_dump(mode="json", by_alias=True),
        "members": [[member.name, member.recipe.model_dump(mode="json", by_alias=True)] for member in longest.members],
        "num_steps": longest.num_steps,
        "settings": result.settings.to_dict(),
        "step_seconds": result.step.seconds,
    }


# ---- in the child process


def compile_row(question: dict[str, Any]) -> None:
    """Prints one JSON line for each program. Ends the process."""
    from jax.experimental import topologies

    from trillora.devices.slices import find_slice

    place = find_slice(question["slice"])
    topology = topologies.get_topology_desc(platform="tpu", topology_name=place.topology, **place.options)
    if question["kind"] == "prove":
        compile_proof(list(topology.devices))
    else:
        compile_training(question, list(topology.devices))
    sys.stdout.flush()
    os._exit(0)


def measured(name: str, compile_program: Callable[[], Any], **more: Any) -> Any:
    """Prints what came out, and returns the program, if there is one."""
    started, program = time.monotonic(), None
    try:
        program = compile_program()
        memory = program.memory_analysis()
        found = {
            "compile_seconds": round(time.monotonic() - started, 1),
            "peak_gib": round(memory.peak_memory_in_bytes / GIB, 2),
            "program_mib": round(memory.generated_code_size_in_bytes / MIB, 1),
        }
    except Exception as error:  # whatever a compiler raises
        found = {"error": " ".join(str(error).split())[:300]}
    print(json.dumps({"program": name, **found, **more}), flush=True)
    return program


def compile_training(question: dict[str, Any], devices: list[Any]) -> None:
    from trillora.devices.mesh import MeshShape, make_mesh
    from trillora.model.loading.source import load_config
    from trillora.recipe.resolve import StepSettings
    from trillora.recipe.schema import Stage, StageRecipe
    from trillora.step.build import assemble
    from trillora.step.compiler_options import refused_options
    from trillora.step.group import assemble_group

    stage, settings = StageRecipe.model_validate(question["stage"]), StepSettings.from_dict(question["settings"])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(question["config"]), "utf-8")
        config = load_config(Path(folder))
    shape = settings.mesh
    mesh = make_mesh(devices, MeshShape(shape.data, shape.fsdp, shape.tensor, shape.adapter))
    members = [Stage(name, StageRecipe.model_validate(recipe)) for name, recipe in question["members"]]
    if members:
        assembly: Any = assemble_group(members, settings, config, mesh)
    else:
        assembly = assemble(stage, settings, config, mesh, question["num_steps"])
    measured("step", assembly.compile, step_seconds=round(question["step_seconds"], 5))
    if question["kind"] == "recipe":
        size, length = settings.micro_batch_size, stage.train.sequence_length
        measured("evaluation", lambda: assembly.compile_evaluation(size, length))
        compile_answers(config, devices, settings.dtype, settings.quantize, assembly.model.lora)
    if refused := refused_options():
        print(json.dumps({"program": "options", "error": f"refused: {' '.join(refused)}"}))


def compile_answers(config: Any, devices: list[Any], dtype: Any, quantize: Any, lora: Any) -> None:
    """Prefill and decode of a batch, as the evaluation of a run uses them."""
    import jax

    from trillora.generation import generator as generation
    from trillora.generation.placement import place_model
    from trillora.step.shardings import shard_adapter, weight_shardings

    model, mesh = place_model(config, devices, lora, dtype, quantize, "full", trust_remote_code=False)

    def shapes(layout: Any, shardings: Any) -> Any:
        return {key: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[key]) for key, x in layout.items()}

    base = shapes(model.layout, weight_shardings(model, mesh))
    adapter = shapes(model.adapter_layout, shard_adapter(model.adapter_layout, mesh))
    generator = generation.Generator(model, base, adapter, NoPrompts(), mesh)  # type: ignore[arg-type]
    programs: list[Any] = []
    generation.compile_program = programs.append  # type: ignore[assignment]
    generator.prepare([[1] * PROMPT] * NUM_PROMPTS, max_tokens=ANSWER)
    for name, lowered in zip(("prefill", "decode"), programs, strict=True):
        measured(name, lowered.compile)


class NoPrompts:
    """In place of a tokenizer: only its stop tokens are needed."""

    stops = (2,)


def compile_proof(devices: list[Any]) -> None:
    """The programs of `trillora doctor --prove` that compute something: the golden model, and collectives."""
    from trillora.prove.golden import golden_dtypes, golden_plan
    from trillora.prove.rates import exchange_program

    for dtype in golden_dtypes(devices[0]):
        measured(f"golden model, {dtype}", lambda dtype=dtype: golden_plan(devices, dtype).compiled)  # type: ignore[misc]
    if len(devices) > 1:
        measured("collectives", lambda: exchange_program(devices).compile())


# ---- the table


def read_records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RECORDS.read_text("utf-8").splitlines()] if RECORDS.exists() else []


def label(row: str) -> str:
    from tpu_steps import CASES

    from trillora.devices.slices import find_slice

    kind, *words, place = row.split(" ")
    if kind != "shape":
        return f"{' '.join(words)}, {place}"
    case = CASES["shapes"][int(words[0])]
    batch = case.rows_per_device * find_slice(place).num_devices
    return f"{case.model.partition('/')[2]} {batch} x {case.tokens}, {place}"


def table() -> str:
    """A row for each program, with three columns for each pair of versions."""
    records = read_records()
    pairs = sorted({(r["jax"], r["libtpu"]) for r in records}, key=lambda pair: [int(n) for n in pair[0].split(".")])
    heads = [f"jax {jax}, libtpu {libtpu}" for jax, libtpu in pairs]
    lines = [f"| program | {' | '.join(heads)} |", "|---" * (1 + len(pairs)) + "|"]
    names = dict.fromkeys((r["row"], r["program"]) for r in records if r["program"] != "options")
    for row, program in sorted(names, key=lambda name: [r.key for r in all_rows()].index(name[0])):
        cells = []
        for jax, libtpu in pairs:
            asked = (row, program, jax, libtpu)
            found = [r for r in records if (r["row"], r["program"], r["jax"], r["libtpu"]) == asked]
            cells.append(cell(found[0]) if found else "not compiled")
        lines.append(f"| {label(row)}: {program} | {' | '.join(cells)} |")
    dates = " ".join(sorted({f"{r['date']}, commit {r['commit']};" for r in records}))
    return "\n".join([*lines, "", f"Compiled on x86-64: {dates.rstrip(';')}."])


def cell(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"**failed**: {found['error']}"
    step = f", {found['step_seconds']:.4g} s" if "step_seconds" in found else ""
    return f"{found['compile_seconds']:.0f} s, {found['peak_gib']:.2f} GiB, {found['program_mib']:.0f} MiB{step}"


def write_table() -> None:
    before, _, rest = PAGE.read_text("utf-8").partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{START}\n{table()}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
