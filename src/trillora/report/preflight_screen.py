"""Preflight's answers on one screen: a page for one slice, a table for several. No jax.

Everything is legible without colour and at 80 columns; colour only repeats what words and places say. Answers are the
objects `--json` prints, and a figure that an answer lacks is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trillora.devices.slices import find_slice

Answer = Mapping[str, Any]

STYLES = {"GO": "bold green", "GO WITH CHANGES": "bold yellow", "NO-GO": "bold red"}
PART_STYLES = {
    "base": "blue",
    "adapter": "cyan",
    "optimizer": "magenta",
    "batch": "white",
    "activations": "green",
    "logits": "yellow",
    "program": "bright_black",
}
UNITS = {"compute": "compute", "hbm": "HBM traffic", "interconnect": "interconnect", "kernels": "attention kernels"}
COMPILER = "Memory as the TPU compiler lays it out"
ESTIMATE = "ESTIMATE of memory and time: the TPU compiler was not asked"
MAX_WIDTH = 100  # wider lines are harder to read
LABEL = 10  # columns in front of each paragraph
FIGURE = 10  # columns of a figure in front of its bar
NUM_BUFFERS, NUM_TRIED = 3, 8


def show(answers: Sequence[Answer], console: Console) -> None:
    """Prints the page of one answer, or the comparison of several."""
    blocks = _one(answers[0], console) if len(answers) == 1 else _several(answers, console)
    for block in blocks:
        console.print(block)


# ---- one slice


def _one(answer: Answer, console: Console) -> Iterable[RenderableType]:
    yield _headline(answer)
    sections: dict[str, Sequence[RenderableType]] = {
        "Memory": _memory(answer, console),
        "One step": _step(answer, console),
        "The run": _run(answer),
        "Settings": _settings(answer),
        "Changes": _changes(answer),
        "Tried": _tried(answer),
        "Host": _host(answer),
        "Notes": [Text(note) for note in answer.get("notes") or ()],
    }
    for label, lines in sections.items():
        if lines:
            yield ""
            yield _section(label, lines, console)


def _section(label: str, lines: Iterable[RenderableType], console: Console) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=LABEL - 1, style="bold")
    grid.add_column(width=_room(console))
    grid.add_row(label, Group(*lines))
    return grid


def _headline(answer: Answer) -> RenderableType:
    verdict = answer["verdict"]
    number, chip = answer["num_devices"], answer["chip"]
    devices = f"one {chip} device" if number == 1 else f"{number} {chip} devices"
    badge = (f" {verdict} ", f"{STYLES[verdict]} reverse")
    lines = [Text.assemble(badge, "  ", (answer["slice"], "bold"), f"  {devices}"), _method(answer)]
    if answer.get("problem"):
        lines.append(Text(answer["problem"], STYLES["NO-GO"]))
    if verdict == "NO-GO":
        lines.append(_smallest([answer]))
    return Group(*lines)


def _method(answer: Answer) -> Text:
    if answer.get("method") == "estimate":
        return Text(ESTIMATE, "bold yellow")
    libtpu = (answer.get("versions") or {}).get("libtpu")
    details = [f"libtpu {libtpu}"] if libtpu else []
    details += ["answered before"] if answer.get("from_cache") else []
    return Text(COMPILER + (f" ({_sentence(details)})" if details else ""), "dim")


def _memory(answer: Answer, console: Console) -> list[RenderableType]:
    """Each part's bar begins where the one above ends, so the last ends at the peak; `|` marks the chip's limit."""
    peak, limit = answer.get("hbm_peak_gib"), answer.get("hbm_limit_gib")
    if peak is None or limit is None:
        return []
    lines: list[RenderableType] = [
        Text.assemble(
            (f"{peak:.2f} of {limit:.2f} GiB", "bold" if peak <= limit else STYLES["NO-GO"]),
            f" of one device ({_share(peak / limit)})"
            if peak <= limit
            else f" of one device: {peak - limit:.2f} too much",
        )
    ]
    parts = {name: gib for name, gib in (answer.get("memory") or {}).items() if gib >= 0.005}
    bars = _Bars(console, label=12, longest=max(limit, peak, sum(parts.values())), mark=limit)
    end = 0.0
    for name, gib in parts.items():
        begin, end = end, end + gib
        lines.append(bars.line(name, f"{gib:.2f} GiB", begin, end, PART_STYLES.get(name, "")))
    largest = _largest_buffers(answer)
    return [*lines, Text("Largest buffers:"), *largest] if largest else lines


def _largest_buffers(answer: Answer) -> list[RenderableType]:
    buffers = (answer.get("largest_buffers") or ())[:NUM_BUFFERS]
    return [_bullet(f"{buffer['what']}, {buffer['gib']:.2f} GiB") for buffer in buffers]


def _step(answer: Answer, console: Console) -> list[RenderableType]:
    seconds = answer.get("step_seconds")
    if seconds is None:
        return []
    error = answer.get("step_seconds_error")
    known = f", known error {_plus_minus(error, console)}" if error is not None else ""
    lines: list[RenderableType] = [Text.assemble((_seconds(seconds), "bold"), f"  estimate{known}")]
    times = {unit: spent for unit, spent in (answer.get("time") or {}).items() if spent}
    units = {unit: words for unit, words in UNITS.items() if unit in times}
    bars = _Bars(console, label=18, longest=max([seconds, *(times[unit] for unit in units)]), mark=seconds)
    lines += [bars.line(words, _seconds(times[unit]), 0, times[unit], "cyan") for unit, words in units.items()]
    if waited := times.get("exposed_interconnect"):
        lines.append(Text(f"They work at the same time; {_seconds(waited)} are spent waiting for the interconnect."))
    if (roofline := answer.get("step_seconds_roofline")) is not None:
        lines.append(Text(f"The busiest of them alone, at its peak (roofline): {_seconds(roofline)}."))
    lines.append(Text(_sentence(_speed(answer))))
    return lines


def _speed(answer: Answer) -> list[str]:
    facts = []
    if answer.get("tokens_per_second") is not None:
        facts.append(f"{answer['tokens_per_second']:,.0f} tokens/s")
    if answer.get("fraction_of_peak") is not None:
        facts.append(f"{_share(answer['fraction_of_peak'])} of the peak arithmetic")
    if answer.get("num_compiles"):
        programs = "1 program" if answer["num_compiles"] == 1 else f"{answer['num_compiles']} programs"
        seconds = answer.get("compile_seconds")
        facts.append(f"{programs} to compile" + (f" (about {_seconds(seconds)})" if seconds else ""))
    return facts


def _run(answer: Answer) -> list[RenderableType]:
    if answer.get("run_hours") is None:
        return []
    lines: list[RenderableType] = [
        Text.assemble((_hours(answer["run_hours"]), "bold"), f"  {_sentence(_amount(answer))}")
    ]
    limits = _sessions(answer)
    if limits:
        lines.append(Text(limits))
    if answer.get("cost") is not None:
        price = answer.get("price_per_hour")
        lines.append(Text(f"Cost: {_cost(answer)}" + (f" at {price:g} a chip and hour" if price else "")))
    return lines


def _amount(answer: Answer) -> list[str]:
    facts = []
    if answer.get("num_steps") is not None:
        facts.append(f"{answer['num_steps']:,} steps")
    if answer.get("num_tokens") is not None:
        facts.append(f"{answer['num_tokens']:,} tokens")
    if answer.get("padding") is not None:
        facts.append(f"{_share(answer['padding'])} padding")
    return facts


def _sessions(answer: Answer) -> str:
    sessions, limit, quota = answer.get("sessions"), answer.get("session_hours"), answer.get("weekly_hours")
    if not sessions or not limit:
        return ""
    text = f"{sessions} session{'s' if sessions > 1 else ''} of at most {limit:g} hours"
    weeks = answer.get("weeks")
    if quota and weeks:
        text += f", in {weeks} week{'s' if weeks > 1 else ''} of {quota:g} hours"
    return text + ("; each goes on where the last one stopped." if sessions > 1 else ".")


def _settings(answer: Answer) -> list[RenderableType]:
    settings = answer.get("settings") or {}
    words = [f"{name.replace('_', ' ')} {value}" for name, value in settings.items() if name != "mesh"]
    lines = [f"mesh {settings['mesh']}"] if settings.get("mesh") else []
    return [Text(line) for line in (*lines, _sentence(words)) if line]


def _changes(answer: Answer) -> list[RenderableType]:
    """As they are pasted behind the recipe's name, and why."""
    changes = answer.get("changes") or ()
    if not changes:
        return []
    pasted = " ".join(_pasted(change["option"], change["to"]) for change in changes)
    lines: list[RenderableType] = [Text.assemble("add to the command: ", (pasted, "bold yellow"))]
    for change in changes:
        lines.append(_bullet(f"{change['option']} {change['from']} -> {change['to']}: {change['why']}"))
    return lines


def _pasted(option: str, value: Any) -> str:
    """`key=value` as the command line takes it; a mapping key by key."""
    if isinstance(value, Mapping):
        return " ".join(_pasted(f"{option}.{key}", inner) for key, inner in value.items())
    return f"{option}={value}"


def _tried(answer: Answer) -> list[RenderableType]:
    tried = list(answer.get("tried") or ())
    lines: list[RenderableType] = []
    for attempt in tried[:NUM_TRIED]:
        peak = attempt.get("peak_gib")
        result = ("fits       ", "green") if attempt["fits"] else ("too large  ", "red")
        memory = f", {peak:.2f} GiB" if peak is not None else ""
        lines.append(Text.assemble(result, f"{attempt['what']}{memory}"))
    if len(tried) > NUM_TRIED:
        lines.append(Text(f"and {len(tried) - NUM_TRIED} more, in --json", "dim"))
    return lines


def _host(answer: Answer) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for need in answer.get("host") or ():
        available = need.get("available_gib")
        there = "" if available is None else f"of {available:,.0f} "
        word = Text("ok", "green") if need["ok"] else Text("too little", STYLES["NO-GO"])
        lines.append(Text.assemble(word, f"  {need['what']}: {need['needed_gib']:.1f} {there}GiB"))
    return lines


# ---- several


def _several(answers: Sequence[Answer], console: Console) -> Iterable[RenderableType]:
    yield _table(answers)
    yield Text(_legend(answers, console), "dim")
    yield _smallest(answers)
    for answer in answers:
        lines = _explanation(answer)
        if lines:
            yield ""
            yield Text.assemble((answer["slice"], "bold"), "  ", (answer["verdict"], STYLES[answer["verdict"]]))
            yield Padding(Group(*lines), (0, 0, 0, 2))


def _table(answers: Sequence[Answer]) -> Table:
    """Columns that say nothing of any answer are left out: sessions where none is limited, cost without a price."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    columns = {
        "slice": [Text(answer["slice"], "bold") for answer in answers],
        "verdict": [Text(answer["verdict"], STYLES[answer["verdict"]]) for answer in answers],
        "HBM GiB": [_peak_of_limit(answer) for answer in answers],
        "step": [_given(answer, "step_seconds", _seconds) for answer in answers],
        "tokens/s": [_given(answer, "tokens_per_second", lambda rate: f"{rate:,.0f}") for answer in answers],
        "run": [_given(answer, "run_hours", _hours) for answer in answers],
        "sessions": [_given(answer, "sessions", str) if answer.get("session_hours") else Text() for answer in answers],
        "cost": [Text(_cost(answer)) for answer in answers],
    }
    shown = {name: cells for name, cells in columns.items() if any(cell.plain for cell in cells)}
    for name in shown:
        table.add_column(name, justify="left" if name in ("slice", "verdict") else "right", overflow="fold")
    for cells in zip(*shown.values(), strict=True):
        table.add_row(*cells)
    return table


def _legend(answers: Sequence[Answer], console: Console) -> str:
    errors = [answer["step_seconds_error"] for answer in answers if answer.get("step_seconds_error") is not None]
    methods = {answer.get("method") for answer in answers}
    times = f"; times are estimates, known error {_plus_minus(max(errors), console)}" if errors else ""
    return f"{ESTIMATE if 'estimate' in methods else COMPILER}{times}."


def _smallest(answers: Sequence[Answer]) -> Text:
    by_chip: dict[str, tuple[int, str]] = {}
    for answer in answers:
        if name := answer.get("smallest_go"):
            found = (answer["num_devices"] if name == answer["slice"] else find_slice(name).num_devices, name)
            by_chip[answer["chip"]] = min(found, by_chip.get(answer["chip"], found))
    names = [name for _, name in by_chip.values()]
    going = [answer for answer in answers if answer["verdict"] != "NO-GO"]
    if not names and going:
        names = [min(going, key=lambda answer: answer["num_devices"])["slice"]]
    if not names:
        return Text("No slice that was tried is GO.", STYLES["NO-GO"])
    return Text.assemble("The smallest slice that is GO: ", (", ".join(names), STYLES["GO"]))


def _explanation(answer: Answer) -> list[RenderableType]:
    if answer["verdict"] == "NO-GO":
        lines: list[RenderableType] = [Text(answer["problem"])] if answer.get("problem") else []
        missing = [need for need in answer.get("host") or () if not need["ok"]]
        return lines + _largest_buffers(answer) + _host({"host": missing})
    return _changes(answer)


# ---- pieces


class _Bars:
    """Bars below each other, behind a name and a figure. `|` stands at `mark`; what is beyond it looks different."""

    def __init__(self, console: Console, label: int, longest: float, mark: float) -> None:
        self._label = label
        self._scale = (_room(console) - label - FIGURE - 2) / longest  # columns for one of what is measured
        self._mark = round(mark * self._scale)
        self._full, self._beyond = ("█", "▒") if _utf(console) else ("#", "!")

    def line(self, name: str, figure: str, begin: float, end: float, style: str) -> Text:
        first = round(begin * self._scale)
        last = max(round(end * self._scale), first + 1)  # what is there is seen
        inside = max(0, min(last, self._mark) - first)
        line = Text(f"{name:<{self._label}}{figure:>{FIGURE}} {' ' * first}")
        line.append(self._full * inside, style)
        line.append(self._beyond * (last - first - inside), STYLES["NO-GO"])
        if last <= self._mark:
            line.append(" " * (self._mark - last) + "|", "dim")
        return line


def _bullet(text: str) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_row("-", Text(text))
    return grid


def _room(console: Console) -> int:
    return min(console.width, MAX_WIDTH) - LABEL


def _utf(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")


def _given(answer: Answer, key: str, words: Callable[[Any], str]) -> Text:
    return Text("" if answer.get(key) is None else words(answer[key]))


def _peak_of_limit(answer: Answer) -> Text:
    if answer.get("hbm_peak_gib") is None:
        return Text()
    return Text(
        f"{answer['hbm_peak_gib']:.1f}/{answer['hbm_limit_gib']:.1f}", "" if answer["fits"] else STYLES["NO-GO"]
    )


def _cost(answer: Answer) -> str:
    cost = answer.get("cost")
    return "" if cost is None else "free" if cost == 0 else f"{cost:,.2f}"


def _plus_minus(error: float, console: Console) -> str:
    return f"{'±' if _utf(console) else '+-'}{_share(error)}"


def _share(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def _seconds(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    if seconds >= 0.1:
        return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s"
    return f"{1000 * seconds:.3g} ms"


def _hours(hours: float) -> str:
    if hours >= 1:
        return f"{hours:,.1f} h"
    return f"{60 * hours:.0f} min" if hours >= 1 / 60 else f"{3600 * hours:.0f} s"


def _sentence(facts: Iterable[str]) -> str:
    return ", ".join(facts)
