"""CPU seconds until a mistake at the command line is answered: ten usual ones, each in a process of its own.

    python benchmarks/mistakes.py                          # this checkout
    python benchmarks/mistakes.py --package OTHER/src      # another one, to compare with

`wall` depends on what else the machine does; `cpu` is user and system time of the process. The answer itself is checked
by tests/cli/test_early.py.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import ROOT, add_record_option, record_if

sys.path.insert(0, str(ROOT / "tests" / "support"))

from early_mistakes import MISTAKES, write_world

SOURCES = ("benchmarks/mistakes.py", "tests/support/early_mistakes.py", "src/trillora/early", "src/trillora/cli")
LIMIT = 300  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, default=ROOT / "src", help="folder with the package to measure")
    parser.add_argument("--only", nargs="*", help="names of mistakes")
    add_record_option(parser)
    args = parser.parse_args()
    found = {}
    print(f"{'mistake':<22}{'cpu':>7}{'wall':>7}")
    for name, (arguments, _) in MISTAKES.items():
        if args.only and name not in args.only:
            continue
        found[name] = measure(arguments, args.package.resolve())
        print(f"{name:<22}{found[name]['cpu']:7.1f}{found[name]['wall']:7.1f}", flush=True)
    slowest = max(one["cpu"] for one in found.values())
    print(f"slowest: {slowest:.1f} CPU seconds")
    record_if(args.record, "mistakes", {"seconds": found, "slowest_cpu": slowest}, SOURCES)


def measure(arguments: tuple[str, ...], package: Path) -> dict[str, float]:
    """Seconds of one command, in a folder of its own."""
    environment = {**os.environ, "PYTHONPATH": str(package)}
    with tempfile.TemporaryDirectory() as world:
        write_world(Path(world))
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        command = [sys.executable, "-m", "trillora", *arguments]
        done = subprocess.run(command, cwd=world, env=environment, capture_output=True, text=True, timeout=LIMIT)
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 2:
        raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu": round(cpu, 2), "wall": round(wall, 2)}


if __name__ == "__main__":
    main()
