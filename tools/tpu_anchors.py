"""Compares simulated step times with published TPU training rates: the table of docs/preflight.md.

    python tools/tpu_anchors.py --list
    python tools/tpu_anchors.py --only llama-3.1-8b@v6e-8     one case: half a minute; with --whole some minutes
    python tools/tpu_anchors.py                               all cases not compiled yet, then the table
    python tools/tpu_anchors.py --table-only                  the table of compiled cases, simulated again

The real TPU compiler compiles the published step for the published slice (full_training.py), as far as preflight does:
until the memory layout and the instruction order are known. With --whole it compiles to the end, and the simulator uses
the compiler's own cycle counts. Scheduled programs are kept in Trillora's cache folder, so a change of the simulator
can be tested without compiling again. Needs libtpu and therefore x86-64 Linux.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from tpu_published_rates import PUBLISHED, Published

from trillora.devices.chips import CHIPS
from trillora.devices.slices import COMPILE_ONLY_ENVIRONMENT, find_slice
from trillora.files.cache_dir import cache_root

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from record import add_record_option, by_name, record_if

SOURCES = (
    *("tools/tpu_anchors.py", "tools/full_training.py", "tools/tpu_published_rates.py", "src/trillora/preflight/hlo"),
    *("src/trillora/engine", "src/trillora/model"),
)
PACKAGES = ("jax", "libtpu", "transformers")
HEADER = """| model, slice | rows x tokens | published | simulated | error | roofline | HBM peak | what differs |
|---|---|---|---|---|---|---|---|"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", help="compile this case, even if it was compiled before")
    parser.add_argument("--list", action="store_true", help="print names, published rates and sources")
    parser.add_argument("--whole", action="store_true", help="compile to the end, machine code included")
    parser.add_argument("--table-only", action="store_true", help="compile nothing")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # for the child process
    add_record_option(parser)
    args = parser.parse_args()
    cases = [case for case in PUBLISHED if args.only in (None, case.name)]
    if not cases:
        parser.error(f"unknown case {args.only}; choose one of {' '.join(case.name for case in PUBLISHED)}")
    if args.list:
        print("\n".join(f"{case.name:22} {case.rate:>14}  {case.source}" for case in cases))
        return 0
    if args.here:
        compile_and_keep(cases[0], whole=args.whole)
    num_failed = 0
    for case in cases:
        if not args.table_only and (args.only or not record_file(case).exists()):
            num_failed += not compile_apart(case, whole=args.whole)
    rows = print_table([case for case in cases if record_file(case).exists()])
    sizes = [abs(row["error"]) for row in rows]
    if sizes:
        values = {"count": len(sizes), "mean_error": sum(sizes) / len(sizes), "largest_error": max(sizes)}
        record_if(args.record, "tpu-anchors", {**values, "rows": by_name(rows, "case")}, SOURCES, on="TPU compiler")
    return 1 if num_failed else 0


def compile_apart(case: Published, *, whole: bool) -> bool:
    """Compile in a child process whose environment is set for compiling only. Prints the error if it fails."""
    print(f"compiling {case.name}", file=sys.stderr, flush=True)
    environment = {**os.environ, **COMPILE_ONLY_ENVIRONMENT, "XLA_FLAGS": ""}
    command = [sys.executable, __file__, "--only", case.name, "--here", *(["--whole"] if whole else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"{case.name} was not compiled:\n{done.stderr.strip()[-2000:]}", file=sys.stderr, flush=True)
    return done.returncode == 0


def compile_and_keep(case: Published, *, whole: bool) -> NoReturn:
    """Write the scheduled program and the compiler's figures to files. Then end the process, and with it a compilation
    that is no longer needed."""
    from full_training import lower_step  # imports jax and torch, which a list or a table does not need

    from trillora.preflight.early_exit import compile_until_layout

    lowered, options, num_weights = lower_step(case)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        result = compile_until_layout(
            lambda **more: lowered.compile(compiler_options={**options, **more}), Path(folder) / "dump", whole=whole
        )
    if result.program is None:
        print(f"does not fit: {result.needed / 2**30:.1f} GiB", file=sys.stderr, flush=True)
        os._exit(1)
    record = {
        "hbm_peak_bytes": result.needed,
        "num_weights": num_weights,
        "compile_seconds": round(result.seconds, 1),
        "whole": result.is_whole,
        "versions": {package: importlib.metadata.version(package) for package in PACKAGES},
    }
    program_file(case).parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(program_file(case), "wt", compresslevel=3) as file:
        file.write(result.program)
    record_file(case).write_text(json.dumps(record, indent=1) + "\n")
    os._exit(0)


def print_table(cases: list[Published]) -> list[dict[str, Any]]:
    """Print a Markdown table and return its rows.

    Rates are tokens per second and device; a positive error is too optimistic.
    """
    from trillora.preflight.hlo.simulate import simulate

    print(HEADER)
    rows: list[dict[str, Any]] = []
    for case in cases:
        record = json.loads(record_file(case).read_text())
        place = find_slice(case.slice_name)
        with gzip.open(program_file(case), "rt") as file:
            step = simulate(file.read(), CHIPS[place.chip], place.num_devices, case.kind_shares)
        num_tokens = case.rows * case.tokens
        published = case.as_tokens_per_second(record["num_weights"])
        row = {
            "case": case.name,
            "sequences": f"{case.rows} x {case.tokens}",
            "published": published,
            "simulated": num_tokens / step.seconds,
            "error": num_tokens / step.seconds / published - 1,
            "roofline": num_tokens / step.roofline_seconds,
            "peak_gib": record["hbm_peak_bytes"] / 2**30,
            "differs": case.differs,
        }
        rows.append(row)
        cells = (
            f"{case.model}, {case.slice_name}",
            row["sequences"],
            *(f"{row[name]:,.0f}" for name in ("published", "simulated")),
            f"{row['error']:+.1%}",
            f"{row['roofline']:,.0f}",
            f"{row['peak_gib']:.1f} GiB",
            case.differs,
        )
        print(f"| {' | '.join(cells)} |")
        for warning in step.warnings:
            print(f"{case.name}: {warning}", file=sys.stderr)
    if rows:
        sizes = sorted(abs(row["error"]) for row in rows)
        print(f"\nErrors of {len(sizes)} cases: mean size {sum(sizes) / len(sizes):.1%}, largest {sizes[-1]:.1%}.")
    return rows


def program_file(case: Published) -> Path:
    return cache_root() / "tpu_anchors" / f"{case.name}.hlo.gz"


def record_file(case: Published) -> Path:
    return cache_root() / "tpu_anchors" / f"{case.name}.json"


if __name__ == "__main__":
    sys.exit(main())
