"""Compares simulated step times with published TPU training rates: the table of benchmarks/PREFLIGHT.md.

    python tools/tpu_anchors.py --list
    python tools/tpu_anchors.py --only llama-3.1-8b@v6e-8     compiles one case: half a minute, with --whole minutes
    python tools/tpu_anchors.py                               compiles all cases
    python tools/tpu_anchors.py --fit                         fits the constants without each model in turn: 5 minutes
    python tools/tpu_anchors.py --table-only                  only simulates the recorded programs again

All of them then write the table. The real TPU compiler compiles the published step for the published slice
(full_training.py), as far as preflight does: until the memory layout and the instruction order are known. With --whole
it compiles to the end, and the simulator uses the compiler's own cycle counts. Compiling needs libtpu and therefore
x86-64 Linux. The scheduled programs are kept in benchmarks/tpu_anchors.json.xz: any machine can make the table.

Three constants of the simulator were set with all rates in view: the share of the peak that products reach, for matrix
units of 128 and of 256, and the share of its time in which the attention kernel does not wait. --fit shows what such
constants are worth for a model that was not in view: it fits them to the other models, and simulates this one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import lzma
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, NoReturn

from generated import ROOT, write_part
from tpu_published_rates import PUBLISHED, Published

from trillora.devices.chips import CHIPS
from trillora.devices.slices import COMPILE_ONLY_ENVIRONMENT, find_slice
from trillora.preflight.hlo import simulate as simulator

sys.path.insert(0, str(ROOT / "benchmarks"))
from record import add_record_option, record_if

SOURCES = ("benchmarks/tpu_anchors.json.xz", "src/trillora/preflight/hlo", "tools/tpu_published_rates.py")
RECORDS = ROOT / "benchmarks" / "tpu_anchors.json.xz"
PAGE, PART = "benchmarks/PREFLIGHT.md", "published rates"
PACKAGES = ("jax", "libtpu", "transformers")
COLUMNS = ("model, slice", "sequences x tokens", "published", "simulated", "error", "held-out error", "roofline")
COLUMNS += ("HBM peak", "what differs")
SAMPLED = (0.75, 0.85, 1.0)  # values of each constant that programs are simulated with; between them times are smooth


class Constants(NamedTuple):
    """Of the peak: products with small and with large matrix units. Of the clock: the attention kernel."""

    small: float
    large: float
    attention: float


TODAY = Constants(simulator.TPU.product, simulator.TPU_LARGE_UNIT.product, simulator.TPU.attention)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", help="compile this case")
    parser.add_argument("--list", action="store_true", help="print names, published rates and sources")
    parser.add_argument("--whole", action="store_true", help="compile to the end, machine code included")
    parser.add_argument("--table-only", action="store_true", help="compile nothing")
    parser.add_argument("--fit", action="store_true", help="compile nothing, fit the constants without each model")
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)  # for the child process
    add_record_option(parser)
    args = parser.parse_args()
    cases = [case for case in PUBLISHED if args.only in (None, case.name)]
    if not cases:
        parser.error(f"unknown case {args.only}; choose one of {' '.join(case.name for case in PUBLISHED)}")
    if args.list:
        print("\n".join(f"{case.name:22} {case.rate:>14}  {case.source}" for case in cases))
        return 0
    if args.to:
        compile_and_keep(cases[0], args.to, whole=args.whole)
    records = read_records()
    num_failed = 0
    for case in () if args.table_only or args.fit else cases:
        compiled = compile_apart(case, whole=args.whole)
        num_failed += compiled is None
        if compiled is not None:
            records["cases"][case.name] = compiled
            write_records(records)
    if args.fit:
        records["fitted_without"] = {name: list(found) for name, found in fit_without_each_model(records)}
        write_records(records)
    write_part(PAGE, PART, table(records))
    record_if(args.record, "tpu-anchors", values_of(records), SOURCES, on="TPU compiler (libtpu 0.0.42.1)")
    return 1 if num_failed else 0


# ---- compiling


def compile_apart(case: Published, *, whole: bool) -> dict[str, Any] | None:
    """Compile in a child process whose environment is set for compiling only. Prints the error if it fails."""
    print(f"compiling {case.name}", file=sys.stderr, flush=True)
    environment = {**os.environ, **COMPILE_ONLY_ENVIRONMENT, "XLA_FLAGS": ""}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "compiled.json"
        command = [sys.executable, __file__, "--only", case.name, "--to", str(file), *(["--whole"] if whole else [])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            compiled: dict[str, Any] = json.loads(file.read_text())
            return compiled
    print(f"{case.name} was not compiled:\n{done.stderr.strip()[-2000:]}", file=sys.stderr, flush=True)
    return None


def compile_and_keep(case: Published, file: Path, *, whole: bool) -> NoReturn:
    """Write the scheduled program and the compiler's figures to a file. Then end the process, and with it a compilation
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
        "whole": result.is_whole,
        "versions": {package: importlib.metadata.version(package) for package in PACKAGES},
        "program": without_sources(result.program),
    }
    file.write_text(json.dumps(record))
    os._exit(0)


def without_sources(program: str) -> str:
    """Without the names of the files that it was traced from, and the parts that refer to them."""
    kept = [part for part in program.split("\n\n") if not re.match(r"\n*(File|Function|Stack)\w+\n", part)]
    return re.sub(r" stack_frame_id=\d+", "", "\n\n".join(kept))


def read_records() -> dict[str, Any]:
    """{"cases": {name: what compile_and_keep wrote}, "fitted_without": {model: constants}}"""
    if not RECORDS.exists():
        return {"cases": {}, "fitted_without": {}}
    records: dict[str, Any] = json.loads(lzma.decompress(RECORDS.read_bytes()))
    return records


def write_records(records: Mapping[str, Any]) -> None:
    RECORDS.write_bytes(lzma.compress(json.dumps(records).encode(), preset=9))


# ---- simulating


@contextmanager
def using(constants: Constants) -> Iterator[None]:
    before = simulator.TPU, simulator.TPU_LARGE_UNIT
    for name, share, efficiency in zip(("TPU", "TPU_LARGE_UNIT"), constants[:2], before, strict=True):
        setattr(simulator, name, replace(efficiency, product=share, attention=constants.attention))
    try:
        yield
    finally:
        simulator.TPU, simulator.TPU_LARGE_UNIT = before


def simulated(case: Published, records: Mapping[str, Any], constants: Constants = TODAY) -> simulator.SimulatedStep:
    place = find_slice(case.slice_name)
    program = records["cases"][case.name]["program"]
    with using(constants):
        return simulator.simulate(program, CHIPS[place.chip], place.num_devices, case.kind_shares)


def published_rate(case: Published, records: Mapping[str, Any]) -> float:
    return case.as_tokens_per_second(records["cases"][case.name]["num_weights"])


def error(case: Published, records: Mapping[str, Any], seconds: float) -> float:
    """Of the rate, relative; positive is too optimistic."""
    return case.rows * case.tokens / seconds / published_rate(case, records) - 1


# ---- fitting


def fit_without_each_model(records: Mapping[str, Any]) -> Iterator[tuple[str, Constants]]:
    """For each model the constants that fit the others best."""
    times = {case.name: sampled_times(case, records) for case in PUBLISHED}
    for model in dict.fromkeys(case.model for case in PUBLISHED):
        rest = [case for case in PUBLISHED if case.model != model]
        yield model, best_constants(rest, records, times)


def sampled_times(case: Published, records: Mapping[str, Any]) -> dict[tuple[float, float], float]:
    """Seconds by the share of products on this chip, and by the share of the attention kernel."""
    return {
        (share, attention): simulated(case, records, Constants(share, share, attention)).seconds
        for share, attention in product(SAMPLED, SAMPLED)
    }


def best_constants(
    cases: Iterable[Published], records: Mapping[str, Any], times: Mapping[str, Mapping[tuple[float, float], float]]
) -> Constants:
    """The least mean square error, on a grid of 0.01, with times between the sampled ones."""
    shares = [number / 100 for number in range(70, 101)]
    small, large = ([case for case in cases if is_large(case) == kind] for kind in (False, True))

    def squares(of: list[Published], share: float, attention: float) -> float:
        return sum(error(case, records, between(times[case.name], share, attention)) ** 2 for case in of)

    def best(attention: float) -> tuple[float, Constants]:
        found = [min((squares(of, share, attention), share) for share in shares) for of in (small, large)]
        return found[0][0] + found[1][0], Constants(found[0][1], found[1][1], attention)

    return min(map(best, shares))[1]


def is_large(case: Published) -> bool:
    return CHIPS[find_slice(case.slice_name).chip].matrix_unit > 128


def between(times: Mapping[tuple[float, float], float], share: float, attention: float) -> float:
    """Times are nearly linear in the inverse of both shares: the plane through the nearest samples."""

    def weights(value: float) -> dict[float, float]:
        low, high = SAMPLED[:2] if value < SAMPLED[1] else SAMPLED[1:]
        part = (1 / value - 1 / low) / (1 / high - 1 / low)
        return {low: 1 - part, high: part}

    return sum(
        times[a, b] * left * right
        for (a, left), (b, right) in product(weights(share).items(), weights(attention).items())
    )


# ---- the table


def table(records: Mapping[str, Any]) -> str:
    """Markdown. Rates are tokens per second and device."""
    lines = []
    errors, held_out = errors_of(records)
    for case, is_off, is_off_held_out in zip(PUBLISHED, errors, held_out, strict=True):
        step = simulated(case, records)
        num_tokens = case.rows * case.tokens
        cells = (
            f"{case.model}, {case.slice_name}",
            f"{case.rows} x {case.tokens}",
            f"{published_rate(case, records):,.0f}",
            f"{num_tokens / step.seconds:,.0f}",
            f"{100 * is_off:+.1f} %",
            f"{100 * is_off_held_out:+.1f} %",
            f"{num_tokens / step.roofline_seconds:,.0f}",
            f"{records['cases'][case.name]['hbm_peak_bytes'] / 2**30:.1f} GiB",
            case.differs,
        )
        lines.append(f"| {' | '.join(cells)} |\n")
    ranges = [sorted(values) for values in zip(*records["fitted_without"].values(), strict=True)]
    shown = [f"{values[0]:.2f} to {values[-1]:.2f}" for values in ranges]
    versions = ", ".join(sorted({record["versions"]["libtpu"] for record in records["cases"].values()}))
    return (
        f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n{''.join(lines)}\n"
        f"With the constants of today ({TODAY.small:.2f}, {TODAY.large:.2f}, {TODAY.attention:.2f}): {sizes(errors)}. "
        f"With constants fitted without the model ({', '.join(shown)}): {sizes(held_out)}. libtpu {versions}.\n"
    )


def errors_of(records: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """With the constants of today, and with those that were fitted without the case's model."""
    errors, held_out = [], []
    for case in PUBLISHED:
        constants = Constants(*records["fitted_without"][case.model])
        errors.append(error(case, records, simulated(case, records).seconds))
        held_out.append(error(case, records, simulated(case, records, constants).seconds))
    return errors, held_out


def values_of(records: Mapping[str, Any]) -> dict[str, float]:
    """What README and docs say of them."""
    found = [[math.fabs(each) for each in errors] for errors in errors_of(records)]
    names = ("error", "held_out_error")
    means = {f"mean_{name}": mean(each) for name, each in zip(names, found, strict=True)}
    return {"count": len(PUBLISHED), **means, **{f"largest_{n}": max(e) for n, e in zip(names, found, strict=True)}}


def sizes(errors: Iterable[float]) -> str:
    found = [100 * math.fabs(each) for each in errors]
    return f"mean {mean(found):.1f} %, largest {max(found):.1f} %"


if __name__ == "__main__":
    sys.exit(main())
