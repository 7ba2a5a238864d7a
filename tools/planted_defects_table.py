"""Which planted defects other programs notice by themselves: writes the tables of dev/DEFECTS.md.

    .venv/bin/python tools/planted_defects_table.py

Noticing means an exception or a warning while the files are loaded. Warnings that the correct files cause too do not
count. Unsloth needs a GPU and is not run.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

import conftest  # noqa: E402, F401  (its settings for jax)
import more_defects  # noqa: E402
import planted_defects  # noqa: E402
import small_world  # noqa: E402
from chat_tokenizers import chat_tokenizer  # noqa: E402
from planted_defects import DEFECTS, Defect, World  # noqa: E402

from trillora.certify.certify import certify  # noqa: E402
from trillora.certify.readers import listening, read_with_llama_cpp  # noqa: E402
from trillora.errors import TrilloraError  # noqa: E402

DOCS = ROOT / "dev" / "DEFECTS.md"
START, END = "<!-- table: start -->", "<!-- table: end -->"
COUNTS_START, COUNTS_END = "<!-- counts: start -->", "<!-- counts: end -->"


def load_with_peft(base: Path | None, target: Path) -> None:
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM

    if base is None:
        AutoPeftModelForCausalLM.from_pretrained(target)
    else:
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), target)
    _load_tokenizer(target)


def load_with_transformers(base: Path | None, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if files := sorted(target.glob("*.gguf")):
        AutoModelForCausalLM.from_pretrained(target, gguf_file=files[0].name)
        AutoTokenizer.from_pretrained(target, gguf_file=files[0].name)
        return
    if base is None:
        AutoModelForCausalLM.from_pretrained(target)  # for an adapter, the base that it names
    else:
        AutoModelForCausalLM.from_pretrained(base).load_adapter(str(target))
    _load_tokenizer(target)


def _load_tokenizer(target: Path) -> None:
    from transformers import AutoTokenizer

    if (target / "tokenizer_config.json").is_file():
        AutoTokenizer.from_pretrained(target)


def load_with_llama_cpp(base: Path | None, target: Path) -> None:
    read_with_llama_cpp(sorted(target.glob("*.gguf"))[0], [[1, 2, 3]], len(chat_tokenizer("llama3")))


RAISED = "exception: "
Load = Callable[[Path | None, Path], None]
READERS: dict[str, tuple[Load, tuple[str, ...]]] = {
    "PEFT": (load_with_peft, ("adapter",)),
    "transformers": (load_with_transformers, ("adapter", "merged", "half", "gguf")),
    "llama.cpp": (load_with_llama_cpp, ("gguf",)),
}


def heard(load: Load, base: Path | None, target: Path) -> set[str]:
    """Exceptions and warnings, without paths that differ between copies. `base` is given if it is not the one that the
    adapter names."""
    with listening() as texts:
        try:
            load(base, target)
        except Exception as error:
            return {f"{RAISED}{type(error).__name__}"}
    return {text.replace(str(target), "").replace(str(base), "")[:200] for text in texts}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        world = planted_defects.write_world(Path(name) / "clean")
        assert certify(world.run).passed
        usual = {
            (reader, target): heard(load, None, getattr(world, target))
            for reader, (load, targets) in READERS.items()
            for target in targets
        }
        assert not any(text.startswith(RAISED) for texts in usual.values() for text in texts), usual
        lines = [_line(defect, world, Path(name) / str(i), usual) for i, defect in enumerate(DEFECTS)]
        worlds = {"float32": world, "bfloat16": more_defects.write_small_world(Path(name) / "small")}
        counts = _counts(worlds, Path(name) / "more")
    head = "| defect | in | check that fails | PEFT | transformers | llama.cpp |\n|---|---|---|---|---|---|\n"
    caught = sum("**missed**" not in line for line in lines)
    table = f"{caught} of {len(lines)} are caught by `trillora certify`.\n\n{head}" + "\n".join(lines)
    text = DOCS.read_text("utf-8")
    for start, end, content in ((START, END, table), (COUNTS_START, COUNTS_END, counts)):
        before, after = text.partition(start)[0], text.partition(end)[2]
        text = f"{before}{start}\n{content}\n{end}{after}"
    DOCS.write_text(text, "utf-8")
    print(table, counts, sep="\n\n")


def _counts(worlds: dict[str, World], folder: Path) -> str:
    """How many of the defects of tests/support/more_defects.py are noticed, by the kind of file."""
    rows: dict[str, Counter[str]] = {}
    usual: dict[tuple[str, str, str], set[str]] = {}
    for number, defect in enumerate(more_defects.DEFECTS):
        world, count = worlds[defect.world], rows.setdefault(defect.target.replace("lora_", "lora "), Counter())
        _, target = small_world.plant(defect, world, folder / str(number))
        count["defects"] += 1
        try:
            count["certify"] += not certify(target).passed
        except TrilloraError:
            count["certify"] += 1
        for reader, (load, targets) in READERS.items():
            if defect.target.partition("_")[0] in targets:
                place = (reader, defect.world, defect.target)
                if place not in usual:
                    usual[place] = heard(load, None, getattr(world, defect.target))
                count[f"read by {reader}"] += 1
                count[reader] += bool(heard(load, None, target) - usual[place])
        shutil.rmtree(folder / str(number))
    head = "| in | defects | certify | PEFT | transformers | llama.cpp |\n|---|---|---|---|---|---|\n"
    total = sum(rows.values(), Counter())
    cells = [
        [kind, count["defects"], count["certify"], *(count[r] if count[f"read by {r}"] else "" for r in READERS)]
        for kind, count in [*rows.items(), ("all", total)]
    ]
    return head + "\n".join(f"| {' | '.join(map(str, each))} |" for each in cells)


def _line(defect: Defect, world: World, folder: Path, usual: dict[tuple[str, str], set[str]]) -> str:
    copy, target = planted_defects.plant(defect, world, folder)
    base = copy.model if defect.base else None
    cells = []
    for reader, (load, targets) in READERS.items():
        if defect.target not in targets or not defect.loads:
            cells.append("" if defect.loads else "not run")
            continue
        new = heard(load, base, target) - usual[reader, defect.target]
        raised = any(text.startswith(RAISED) for text in new)
        cells.append("silent" if not new else "refuses it" if raised else "warns")
    try:
        failed = certify(target, base=str(copy.model) if defect.base else None).failed
        found = ", ".join(dict.fromkeys(f"{check.part}: {check.name}" for check in failed)) or "**missed**"
    except TrilloraError as error:
        found = error.what
    kind = defect.target.replace("half", "merged").replace("_", " ")
    return f"| {defect.name} | {kind} | {found} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
