"""Shows preflight results in the terminal: a page for one slice, a table for several. No jax.

Everything is readable without color and at 80 columns; color only repeats what the words say. Values that a result does
not have are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trillora.devices.slices import find_slice
from trillora.preflight.result import HostLine, MeasuredSpeeds, PreflightResult, RunForecast, StepForecast
from trillora.report.numbers import format_count, format_duration, format_percent
from trillora.step.search import format_seconds

STYLES = {"GO": "bold green", "GO WITH CHANGES": "bold yellow", "NO-GO": "bold red"}
MEANING = {
    "GO": "the run fits",
    "GO WITH CHANGES": "the run fits with the changes below",
    "NO-GO": "the run does not fit",
}
PART_STYLES = {
    "base": "blue",
    "adapter": "cyan",
    "optimizer": "magenta",
    "batch": "white",
    "gathered": "bright_blue",
    "activations": "green",
    "logits": "yellow",
}
UNITS = {"compute": "compute", "hbm": "HBM traffic", "interconnect": "interconnect", "kernels": "attention kernels"}
MEASURED_UNITS = {"compute": "products", "hbm": "HBM", "links": "interconnect"}
COMPILER = "Memory from the TPU compiler"
ESTIMATE = "ESTIMATE: memory and time were estimated without the TPU compiler"
MAX_WIDTH = 100  # columns; wider lines are harder to read
LABEL = 10  # columns of a section's label
FIGURE = 10  # columns of the number in front of a bar
NUM_BUFFERS, NUM_TRIED = 3, 8


def show(results: Sequence[PreflightResult], console: Console) -> None:
    """Prints the page of one result, or a comparison of several."""
    blocks = _one(results[0], console) if len(results) == 1 else _several(results, console)
    for block in blocks:
        console.print(block)


# ---- one slice


def _one(result: PreflightResult, console: Console) -> Iterable[RenderableType]:
    yield _headline(result)
    sections: dict[str, Sequence[RenderableType]] = {
        "Memory": _memory(result, console),
        "One step": _step(result, console),
        "The run": _run(result.run) if result.run else (),
        "Settings": _settings(result),
        "Changes": _changes(result),
        "Tried": _tried(result),
        "Host": _host(result.host),
        "Notes": list(map(_note, result.notes)),
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


def _headline(result: PreflightResult) -> RenderableType:
    devices = format_count(result.num_devices, f"{result.chip} device", f"{result.chip} devices")
    badge = (f" {result.verdict} ", f"{STYLES[result.verdict]} reverse")
    place = (result.slice, "bold")
    lines = [Text.assemble(badge, "  ", place, f" ({devices}): {MEANING[result.verdict]}"), _method(result)]
    if result.problem:
        lines.append(Text(result.problem, STYLES["NO-GO"]))
    if not result.fits:
        lines.append(_smallest([result]))
    return Group(*lines)


def _method(result: PreflightResult) -> Text:
    if result.method == "estimate":
        return Text(ESTIMATE, "bold yellow")
    libtpu = result.versions.get("libtpu")
    details = [f"libtpu {libtpu}"] if libtpu else []
    details += ["cached result"] if result.from_cache else []
    return Text(COMPILER + (f" ({', '.join(details)})" if details else ""), "dim")


def _memory(result: PreflightResult, console: Console) -> list[RenderableType]:
    """Each bar begins where the one above ends, so the last one ends at the peak. `|` marks the chip's limit."""
    peak, limit = result.hbm_peak_gib, result.hbm_limit_gib
    if peak is None:
        return []
    if result.fits:
        style, text = "bold", f"({_percent(peak / limit)})"
    elif peak > limit:
        style, text = STYLES["NO-GO"], f"({peak - limit:.2f} GiB too much)"
    else:
        style, text = (
            STYLES["NO-GO"],
            "(too close to the limit: a checkpoint needs a second copy of the state)",
        )
    lines: list[RenderableType] = [Text.assemble((f"{peak:.2f} of {limit:.2f} GiB", style), f" per device {text}")]
    parts = {name: gib for name, gib in result.memory.items() if gib >= 0.005}
    bars = _Bars(console, label=12, longest=max(limit, peak, sum(parts.values())), mark=limit)
    end = 0.0
    for name, gib in parts.items():
        begin, end = end, end + gib
        lines.append(bars.line(name, f"{gib:.2f} GiB", begin, end, PART_STYLES.get(name, "")))
    largest = _largest_buffers(result)
    return [*lines, Text("Largest buffers:"), *largest] if largest else lines


def _largest_buffers(result: PreflightResult) -> list[RenderableType]:
    return [_bullet(f"{buffer.what}, {buffer.gib:.2f} GiB") for buffer in result.largest_buffers[:NUM_BUFFERS]]


def _step(result: PreflightResult, console: Console) -> list[RenderableType]:
    step = result.step
    if step is None:
        return []
    error = f"estimated, error up to {_plus_minus(step.error, console)}"
    lines: list[RenderableType] = [Text.assemble((format_seconds(step.seconds), "bold"), f"  {error}")]
    if result.measured is not None:
        lines.append(Text(_measured(result.measured)))
    if step.unit_seconds is not None:
        times = {words: getattr(step.unit_seconds, unit) for unit, words in UNITS.items()}
        times = {words: spent for words, spent in times.items() if spent}
        bars = _Bars(console, label=18, longest=max([step.seconds, *times.values()]), mark=step.seconds)
        lines += [bars.line(words, format_seconds(spent), 0, spent, "cyan") for words, spent in times.items()]
        if waited := step.unit_seconds.exposed_interconnect:
            lines.append(Text(f"These overlap. The step waits {format_seconds(waited)} for the interconnect."))
    lines.append(Text(f"Roofline (lower bound at the chip's peak rates): {format_seconds(step.roofline_seconds)}."))
    lines.append(Text(_speed(step, result.run)))
    return lines


def _measured(speeds: MeasuredSpeeds) -> str:
    devices = format_count(speeds.num_devices, "device", "devices")
    slow = {words: getattr(speeds, unit) for unit, words in MEASURED_UNITS.items()}
    parts = [f"{words} {times:.2f}x slower" for words, times in slow.items() if times > 1]
    measured = f"the speeds measured on {speeds.date} ({devices})"
    return f"Corrected by {measured}: {', '.join(parts)} than assumed." if parts else f"Confirmed by {measured}."


def _speed(step: StepForecast, run: RunForecast | None) -> str:
    facts = [f"{step.tokens_per_second:,.0f} tokens/s", f"{_percent(step.fraction_of_peak)} of peak FLOP/s"]
    if run is not None:
        programs = format_count(run.num_compiles, "program", "programs")
        facts.append(f"{programs} to compile (about {format_seconds(run.compile_seconds)})")
    return ", ".join(facts)


def _run(run: RunForecast) -> list[RenderableType]:
    amount = f"{run.num_steps:,} steps, {run.num_tokens:,} tokens, {_percent(run.padding)} padding"
    lines: list[RenderableType] = [Text.assemble((_run_time(run), "bold"), f"  {amount}")]
    if run.session_hours:
        text = f"{format_count(run.sessions, 'session', 'sessions')} of at most {run.session_hours:g} hours"
        if run.weekly_hours:
            text += f", in {format_count(run.weeks, 'week', 'weeks')} of {run.weekly_hours:g} hours"
        lines.append(Text(text + ("; each session resumes the run." if run.sessions > 1 else ".")))
    if run.cost is not None:
        price = f" at {run.price_per_hour:g} per chip-hour" if run.price_per_hour else ""
        lines.append(Text(f"Cost: {_cost(run)}{price}"))
    return lines


def _settings(result: PreflightResult) -> list[RenderableType]:
    settings = result.settings
    if settings is None:
        return []
    mesh = settings.mesh
    base = settings.dtype if settings.quantize == "none" else f"{settings.dtype} with an {settings.quantize} base"
    base += "" if settings.matmul == "full" else f" and matmuls in {settings.matmul}"
    return [
        Text(f"mesh data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor}"),
        Text(
            f"micro batch size {settings.micro_batch_size}, remat {settings.remat}, loss chunk {settings.loss_chunk}, "
            f"attention {settings.attention}, layers {settings.layers}, {base}"
        ),
    ]


def _changes(result: PreflightResult) -> list[RenderableType]:
    """The changes as arguments to paste after the recipe's name, and why."""
    if not result.changes:
        return []
    arguments = " ".join(_argument(change.option, change.after) for change in result.changes)
    lines: list[RenderableType] = [Text.assemble("add to the command: ", (arguments, "bold yellow"))]
    return lines + [_bullet(f"{c.option} {c.before} -> {c.after}: {c.why}") for c in result.changes]


def _argument(option: str, value: Any) -> str:
    """`key=value` for the command line; a mapping becomes one argument per key."""
    if isinstance(value, Mapping):
        return " ".join(_argument(f"{option}.{key}", inner) for key, inner in value.items())
    return f"{option}={value}"


def _tried(result: PreflightResult) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for trial in result.tried[:NUM_TRIED]:
        word, style = ("too large", "red") if not trial.fits else ("fits", "green")
        if trial.fits and trial is not result.tried[-1]:
            word, style = "slower", "yellow"
        memory = f", {trial.peak_gib:.2f} GiB" if trial.peak_gib is not None else ""
        time = f", {format_seconds(trial.seconds)}" if trial.seconds is not None else ""
        lines.append(Text.assemble((f"{word:<11}", style), f"{trial.what}{time}{memory}"))
    if len(result.tried) > NUM_TRIED:
        lines.append(Text(f"and {len(result.tried) - NUM_TRIED} more; --json lists all", "dim"))
    return lines


def _host(needs: Sequence[HostLine]) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for need in needs:
        available = "" if need.available_gib is None else f"of {need.available_gib:,.0f} "
        word = Text("ok", "green") if need.ok else Text("too little", STYLES["NO-GO"])
        lines.append(Text.assemble(word, f"  {need.what}: {need.needed_gib:.1f} {available}GiB"))
    return lines


# ---- several slices


def _several(results: Sequence[PreflightResult], console: Console) -> Iterable[RenderableType]:
    yield _table(results)
    yield Text(_legend(results, console), "dim")
    yield _smallest(results)
    for result in results:
        lines = _explanation(result)
        if lines:
            yield ""
            yield Text.assemble((result.slice, "bold"), "  ", (result.verdict, STYLES[result.verdict]))
            yield Padding(Group(*lines), (0, 0, 0, 2))
    notes = dict.fromkeys(note for result in results for note in result.notes)
    for result in results:
        if result.measured is not None:
            notes[f"{result.slice}: {_measured(result.measured)}"] = None
    if notes:
        yield ""
        yield from map(_note, notes)


def _table(results: Sequence[PreflightResult]) -> Table:
    """Columns without any value are left out, for example sessions if none is limited, or cost without a price."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    rows = [_cells(result) for result in results]
    shown = [name for name in rows[0] if any(row[name].plain for row in rows)]
    for name in shown:
        table.add_column(name, justify="left" if name in ("slice", "verdict") else "right", overflow="fold")
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    return table


def _cells(result: PreflightResult) -> dict[str, Text]:
    step, run = result.step, result.run
    peak = "" if result.hbm_peak_gib is None else f"{result.hbm_peak_gib:.1f}/{result.hbm_limit_gib:.1f}"
    return {
        "slice": Text(result.slice, "bold"),
        "verdict": Text(result.verdict, STYLES[result.verdict]),
        "HBM GiB": Text(peak, "" if result.fits else STYLES["NO-GO"]),
        "step": Text(format_seconds(step.seconds) if step else ""),
        "tokens/s": Text(f"{step.tokens_per_second:,.0f}" if step else ""),
        "run": Text(_run_time(run) if run else ""),
        "sessions": Text(str(run.sessions) if run and run.session_hours else ""),
        "cost": Text(_cost(run) if run else ""),
    }


def _legend(results: Sequence[PreflightResult], console: Console) -> str:
    errors = [result.step.error for result in results if result.step is not None]
    times = f"; times are estimates, error up to {_plus_minus(max(errors), console)}" if errors else ""
    return f"{ESTIMATE if any(result.method == 'estimate' for result in results) else COMPILER}{times}."


def _smallest(results: Sequence[PreflightResult]) -> Text:
    by_chip: dict[str, tuple[int, str]] = {}
    for result in results:
        if name := result.smallest_go:
            found = (result.num_devices if name == result.slice else find_slice(name).num_devices, name)
            by_chip[result.chip] = min(found, by_chip.get(result.chip, found))
    if not by_chip:
        tried = "this slice or the larger ones tried" if len(results) == 1 else "any of the slices tried"
        return Text(f"The run does not fit {tried}.", STYLES["NO-GO"])
    return Text.assemble("Smallest slice that fits: ", (", ".join(name for _, name in by_chip.values()), STYLES["GO"]))


def _explanation(result: PreflightResult) -> list[RenderableType]:
    if result.fits:
        return _changes(result)
    lines: list[RenderableType] = [Text(result.problem)] if result.problem else []
    return lines + _largest_buffers(result) + _host([need for need in result.host if not need.ok])


# ---- parts


class _Bars:
    """Horizontal bars, each after a name and a number. `|` marks a limit; the part beyond it is drawn differently."""

    def __init__(self, console: Console, label: int, longest: float, mark: float) -> None:
        self._label = label
        self._scale = (_room(console) - label - FIGURE - 2) / longest  # columns per unit
        self._mark = round(mark * self._scale)
        self._full, self._beyond = ("█", "▒") if _utf(console) else ("#", "!")

    def line(self, name: str, figure: str, begin: float, end: float, style: str) -> Text:
        first = round(begin * self._scale)
        last = max(round(end * self._scale), first + 1)  # at least one column
        inside = max(0, min(last, self._mark) - first)
        line = Text(f"{name:<{self._label}}{figure:>{FIGURE}} {' ' * first}")
        line.append(self._full * inside, style)
        line.append(self._beyond * (last - first - inside), STYLES["NO-GO"])
        if last <= self._mark:
            line.append(" " * (self._mark - last) + "|", "dim")
        return line


def _bullet(text: str, style: str = "") -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_row("-", Text(text, style))
    return grid


def _note(text: str) -> RenderableType:
    return _bullet(text, "bold yellow" if text.startswith("Warning") else "")


def _room(console: Console) -> int:
    return min(console.width, MAX_WIDTH) - LABEL


def _utf(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")


def _run_time(run: RunForecast) -> str:
    return format_duration(run.hours * 3600)


def _cost(run: RunForecast) -> str:
    return "" if run.cost is None else "free" if run.cost == 0 else f"{run.cost:,.2f}"


def _plus_minus(error: float, console: Console) -> str:
    return f"{'±' if _utf(console) else '+-'}{_percent(error)}"


def _percent(fraction: float) -> str:
    """Whole percent. Plain spaces: the terminal may be ASCII only."""
    return format_percent(round(fraction, 2)).replace("\u00a0", " ")
