"""The tables of README and docs that are made from records.

`show(sample, path)` gives a number in the form of the sample:

    show("1,000", "peers.1b-2048.trillora.step_ms")                                         166
    show("1.00", "data-prep.200000.trillora.seconds / data-prep.200000.trl.seconds")        0.28
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from claims import Show

GPU_WORKS = {
    "1b-2048": "1.2B, 8 x 2,048 tokens",
    "1b-packed": "1.2B, documents of 512 tokens",
    "1b-8192": "1.2B, 2 x 8,192 tokens",
    "7b-2048": "7.2B, 4 x 2,048 tokens",
    "7b-packed": "7.2B, documents of 512 tokens",
    "7b-8192": "7.2B, 1 x 8,192 tokens",
}
ENGINES = {"trillora": "Trillora", "unsloth": "Unsloth", "trl-liger": "TRL + Liger", "trl": "TRL"}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(head)
    return "".join(f"{text}\n" for text in (line(columns), "|" + "---|" * len(columns), *map(line, rows)))


def line(cells: Iterable[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def quickstart(show: Show) -> str:
    tested = {
        "json": "JSON with the right fields",
        "provider": "right provider",
        "area": "right area",
        "severity": "right severity (not learned)",
    }

    def row(name: str) -> list[str]:
        guess = "" if name == "json" else show("0 %", f"quickstart.{name}.most_frequent")
        return [tested[name], *(show("0 %", f"quickstart.{name}.{when}") for when in ("before", "after")), guess]

    return table(("", "before", "after", "most frequent answer"), map(row, tested))


def speed(show: Show) -> str:
    """README's: tokens/s and GiB of all engines."""

    def cell(record: str, engine: str) -> str:
        number, memory = (show(sample, f"{record}.{engine}.{name}") for sample, name in RATE)
        return f"**{number}**, {memory}" if engine == "trillora" else f"{number}, {memory}"

    rows = [
        [what, *(cell(f"peers.{work}", engine) for engine in ENGINES), ratio(show, f"peers.{work}", "unsloth")]
        for work, what in GPU_WORKS.items()
    ]
    fp8 = "peers-fp8.7b-2048"
    rows.append(
        [
            "7.2B, 4 x 2,048 tokens, base matmuls in fp8, another day",
            cell(fp8, "trillora, fp8"),
            f"bfloat16: {cell(fp8, 'unsloth')}",
            *("", ""),
            ratio(show, fp8, "unsloth", "trillora, fp8"),
        ]
    )
    return table(("tokens/s, GiB", *ENGINES.values(), "against Unsloth"), rows)


RATE = (("1,000", "tokens_per_second"), ("1.0", "peak_gib"))


def ratio(show: Show, record: str, other: str, ours: str = "trillora") -> str:
    return show("1.00", f"{record}.{ours}.tokens_per_second / {record}.{other}.tokens_per_second")


def speed_pairs(show: Show) -> str:
    """The docs': Trillora next to one other engine, for each work."""

    def rate(record: str, engine: str) -> str:
        return "{} tokens/s, {} GiB".format(*(show(sample, f"{record}.{engine}.{name}") for sample, name in RATE))

    def row(what: str, record: str, other: str, name: str, ours: str = "trillora") -> list[str]:
        return [what, rate(record, ours), f"{name} {rate(record, other)}", f"{ratio(show, record, other, ours)} x"]

    rows = [row(f"{what}, H200", f"peers.{work}", "unsloth", "Unsloth") for work, what in GPU_WORKS.items()]
    rows += [
        row(f"{GPU_WORKS[work]}, H200", f"peers.{work}", "trl-liger", "TRL with Liger kernels")
        for work in ("1b-2048", "7b-2048")
    ]
    fp8, bfloat16 = "7.2B with `engine.matmul: fp8` (numbers change)", "ours in bfloat16 on that day"
    packed = [show("1,000", f"packed.16.{how}") for how in ("lengths", "mask")]
    paths = [f"data-prep.200000.{engine}.seconds" for engine in ("trillora", "trl, num_proc 2")]
    chats = [show("1.0", path) for path in paths]
    rows += [
        row(fp8, "peers-fp8.7b-2048", "trillora", bfloat16, "trillora, fp8"),
        row("MoE with 32 experts, H200", "peers-mixture.mixture", "trl", "TRL"),
        [
            "packed, 16 documents in a sequence, H200",
            f"{packed[0]} tokens/s",
            f"ours with a mask {packed[1]} tokens/s",
            f"{show('1.00', 'packed.16.lengths / packed.16.mask')} x",
        ],
        [
            "200,000 chats to batches, two cores",
            f"{chats[0]} s",
            f"TRL with two processes {chats[1]} s",
            f"{show('1.00', ' / '.join(paths))} of the time",
        ],
    ]
    return table(("", "ours", "other", "ratio"), rows)


def tpu_steps(show: Show) -> str:
    """By the TPU compiler and the simulation. Tunix was compiled for three of them."""
    against = ("Llama-3.2-1B v5e-8 8 x 2048", "Llama-3.1-8B v6e-8 8 x 2048", "Qwen3-0.6B v5e-8 8 x 2048")
    others = {
        "Gemma-3-270M v5e-8 64 x 512": "out of memory there",
        "Llama-3.1-8B v6e-8 24 x 8192": "not compared",
    }

    def row(case: str) -> list[str]:
        model, place, size = case.split(" ", 2)
        path = f"tpu-steps.{case}"
        step = show("1.0000", f"{path}.seconds")
        rate = show("1,000", f"{path}.tokens_per_second_per_device")
        tunix = others.get(case) or f"{show('1.00', f'{path}.seconds / {path}.tunix_seconds')} of its time"
        return [f"{model}, {place}, {size}", f"{step} s", rate, tunix]

    return table(("", "step", "tokens/s/device", "against Tunix"), map(row, (*against, *others)))


def preflight_gpu(show: Show) -> str:
    """Steps predicted by preflight and measured."""
    head = "model|sequences x tokens|remat|GiB predicted|measured|s predicted|measured|error|with new constants"
    columns = {"gib_predicted": "1.00", "gib": "1.00", "seconds_predicted": "1.000", "seconds": "1.000"}
    columns |= {"error": "+1.0 %", "refitted_error": "+1.0 %"}

    def row(name: str) -> list[str]:
        path = f"preflight-gpu.rows.{name}"
        texts = [show.text(f"{path}.{column}") for column in ("model", "sequences", "remat")]
        return [*texts, *(show(sample, f"{path}.{column}") for column, sample in columns.items())]

    return table(head.split("|"), map(row, show.names("preflight-gpu.rows")))


def seed_advice(show: Show) -> str:
    """One option changed at a time; the recipe's own values in bold."""
    own = ("train.batch_size=128", "train.sequence_length=512", "model.dtype=bfloat16")

    def row(option: str) -> list[str]:
        path = f"seed-advice.{option}"
        rows, remat = show("1", f"{path}.micro_batch_size"), show.text(f"{path}.remat")
        numbers = f"{show('1.0', f'{path}.memory_gib')} GiB", f"{show('1', f'{path}.step_ms')} ms"
        rate = show("1,000", f"{path}.tokens_per_second")
        return [f"**`{option}`**" if option in own else f"`{option}`", f"{rows}, {remat}", *numbers, rate]

    return table(("option", "micro-batch, remat", "memory", "step", "tokens/s"), map(row, show.names("seed-advice")))


def one_chip(show: Show) -> str:
    """A 7B model on one v5e chip, by the format of its base."""

    def row(name: str) -> list[str]:
        path = f"one-chip-7b.formats.{name}"
        has_step = "step_seconds" in show.names(path)
        forms = {"peak": "1.00", "base": "1.00" if has_step else "1.0", "estimate": "1.00"}
        memory = [f"{show(form, f'{path}.{what}_gib')} GiB" for what, form in forms.items()]
        step = f"{show('1.00', f'{path}.step_seconds')} s" if has_step else ""
        estimate = f", {show('1.0', f'{path}.estimate_seconds')} s" if has_step else ""
        return [name, show.text(f"{path}.verdict"), memory[0], memory[1], step, memory[2] + estimate]

    head = "format|verdict|memory|of it the base|step|estimate without the compiler"
    return table(head.split("|"), map(row, show.names("one-chip-7b.formats")))


def quantized(show: Show) -> str:
    """Losses and times of SmolLM2 by the format of its base, next to bfloat16."""

    def row(name: str) -> list[str]:
        path = f"quantized.formats.{name}"
        before, after = show("1.000", f"{path}.before"), show("1.0000", f"{path}.after")
        loss = show("1.00", f"{path}.after / quantized.formats.bfloat16.after")
        return [name, before, after, loss, show("1.00", f"{path}.relative_step")]

    head = "base|held-out loss before|after|relative to bfloat16|step time, relative"
    return table(head.split("|"), map(row, show.names("quantized.formats")))


TABLES: dict[str, Callable[[Show], str]] = {
    "quickstart": quickstart,
    "speed": speed,
    "speed pairs": speed_pairs,
    "tpu steps": tpu_steps,
    "preflight gpu": preflight_gpu,
    "seed advice": seed_advice,
    "one chip": one_chip,
    "quantized": quantized,
}
