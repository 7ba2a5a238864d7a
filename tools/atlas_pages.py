"""The pages of the fit atlas, made from docs/atlas.jsonl alone: a Markdown page, and a table to sort in the browser.

    render(read_steps(Path("docs/atlas.jsonl")))      # {"ATLAS.md": "# Fit atlas …", "atlas.html": "<!DOCTYPE html> …"}

The HTML page is one file. It loads nothing, and the browser runs only the script whose hash is in its security policy.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atlas_steps import MODELS, SLICES, TOKENS, Step, config_of, limit_of, next_ask, of_cell

from trillora.devices.chips import CHIPS
from trillora.devices.slices import find_slice
from trillora.launch.offers import CHIP_OFFERS, PRICES_OF
from trillora.report.html import base_style, text

# Dollars per chip-hour on demand in US zones. v4 is not offered by `trillora launch`; its price has the same source.
PRICES = {chip: offer.on_demand for chip, offer in CHIP_OFFERS.items() if offer.on_demand} | {"v4": 12.88 / 4}
NOTEBOOKS = {"v5e-1": "Colab, free", "v6e-1": "Colab, paid", "v5e-8": "Kaggle, free"}
TEMPLATES = Path(__file__).with_name("atlas_page")
MILLION = 1_000_000


@dataclass(frozen=True)
class Cell:
    """A model on a slice, as the pages show it."""

    model: str
    slice: str
    first: Step
    longest: int  # tokens of the longest sequence that fits; 0: none of those tried
    longest_is_known: bool  # False: the search is not complete, or longer than the model supports was not tried

    @property
    def is_estimate(self) -> bool:
        return self.first.method == "estimate"

    @property
    def time_is_estimate(self) -> bool:
        return self.first.timed_by == "estimate"

    @property
    def verdict(self) -> str:
        return "failed" if self.first.failed else "GO" if self.first.fits else "NO-GO"

    @property
    def micro_batch(self) -> int | None:
        return int(self.first.settings["micro_batch_size"]) if self.first.settings else None

    @property
    def base(self) -> str:
        """Number format of the base."""
        settings = self.first.settings
        if settings is None:
            return ""
        return str(settings["dtype"] if settings["quantize"] == "none" else settings["quantize"])

    @property
    def remat(self) -> str:
        return str(self.first.settings["remat"]) if self.first.settings else ""

    @property
    def tokens_per_second(self) -> float | None:
        return self.first.batch_size * self.first.tokens / self.first.seconds if self.first.seconds else None

    @property
    def share_of_peak(self) -> float | None:
        place = find_slice(self.slice)
        if self.first.flops is None or self.first.seconds is None:
            return None
        return self.first.flops / (self.first.seconds * place.num_devices * CHIPS[place.chip].bf16_tflops * 1e12)

    @property
    def hours_per_million(self) -> float | None:
        return MILLION / self.tokens_per_second / 3600 if self.tokens_per_second else None

    @property
    def cost_per_million(self) -> float | None:
        price = hourly_price(self.slice)
        return None if self.hours_per_million is None or price is None else self.hours_per_million * price


def hourly_price(slice_name: str) -> float | None:
    """Dollars of the whole slice; None: not published."""
    place = find_slice(slice_name)
    return PRICES[place.chip] * place.num_chips if place.chip in PRICES else None


def cells_of(steps: Sequence[Step]) -> list[Cell]:
    """The cells that have an answer, by model and slice in the order of the pages."""
    found = []
    for model in by_size(steps):
        for slice_name in by_chip():
            cell = of_cell(steps, model, slice_name)
            first = next((step for step in cell if not step.is_long), None)
            if first is not None:
                longest = max((step.tokens for step in cell if step.fits), default=0)
                is_known = next_ask(model, slice_name, cell) is None and not any(step.failed for step in cell)
                found.append(Cell(model, slice_name, first, longest, is_known))
    return found


def by_size(steps: Sequence[Step]) -> list[str]:
    """The models, smallest first."""
    sizes = sizes_of(steps)
    return sorted(MODELS, key=lambda model: (sizes.get(model, 0), model))


def sizes_of(steps: Iterable[Step]) -> dict[str, int]:
    """Parameters of each model."""
    return {step.model: step.num_parameters for step in steps if step.num_parameters}


def by_chip() -> list[str]:
    """The slices by chip and size."""
    chips = ("v5e", "v6e", "v4", "v5p", "7x")
    return sorted(SLICES, key=lambda name: (chips.index(find_slice(name).chip), find_slice(name).num_devices))


def render(steps: Sequence[Step]) -> dict[str, str]:
    cells = cells_of(steps)
    return {"ATLAS.md": markdown(cells, steps), "atlas.html": page(cells, steps)}


def _template(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _filled(template: str, **parts: str | int) -> str:
    """A template with `{{name}}` replaced, in one pass: a value that looks like a placeholder stays as it is."""
    filled, *pieces = _template(template).split("{{")
    for piece in pieces:
        name, _, rest = piece.partition("}}")
        filled += str(parts[name]) + rest
    return filled


# ---- figures as text


def tokens_text(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def longest_text(cell: Cell) -> str:
    if not cell.longest:
        return "none" if cell.longest_is_known else ""
    return ("" if cell.longest_is_known else "≥ ") + tokens_text(cell.longest)


def significant(number: float | None) -> str:
    """Three digits, without an exponent."""
    if number is None:
        return ""
    if number >= 100:
        return f"{number:,.0f}"
    digits = 2 if number >= 1 else 3 if number >= 0.1 else 4
    return f"{number:.{digits}f}"


def size_text(num_parameters: int | None) -> str:
    if not num_parameters:
        return ""
    return f"{num_parameters / 1e9:.1f} B" if num_parameters >= 0.9995e9 else f"{num_parameters / 1e6:.0f} M"


def short_name(model: str) -> str:
    return model.partition("/")[2]


# ---- Markdown


def markdown(cells: Sequence[Cell], steps: Sequence[Step]) -> str:
    slices = [name for name in by_chip() if any(cell.slice == name for cell in cells)]
    models = [model for model in by_size(steps) if any(cell.model == model for cell in cells)]
    at = {(cell.model, cell.slice): cell for cell in cells}
    sizes = sizes_of(steps)

    def matrix(show: Callable[[Cell], str]) -> str:
        lines = [f"| model | | {' | '.join(slices)} |", f"|---|---:|{'---:|' * len(slices)}"]
        for model in models:
            found = [at.get((model, name)) for name in slices]
            shown = [marked(cell, show(cell)) if cell else "" for cell in found]
            lines.append(f"| {short_name(model)} | {size_text(sizes.get(model))} | {' | '.join(shown)} |")
        return "\n".join(lines)

    return _filled(
        "page.md",
        counts=f"{counts_text(cells)} {_escaped(versions_text(steps))}",
        sources="\n".join(f"- {_escaped(line)}" for line in sources(cells)),
        tokens=TOKENS,
        prices=", ".join(f"{chip} ${price:.2f}" for chip, price in PRICES.items()),
        prices_of=PRICES_OF,
        best=best_table(models, cells, sizes),
        longest=matrix(longest_cell),
        speed=matrix(lambda cell: timed(cell, cell.tokens_per_second)),
        failures=failures(cells),
    )


def best_table(models: Sequence[str], cells: Sequence[Cell], sizes: Mapping[str, int]) -> str:
    """For each model the slice with the lowest price per hour, the cheapest per token, and the fastest."""
    lines = [
        "| model | | smallest that fits | longest | lowest cost | $ per M | fastest | tokens/s |",
        "|---|---:|---|---:|---|---:|---|---:|",
    ]
    for model in models:
        fitting = [cell for cell in cells if cell.model == model and cell.first.fits]
        name = f"| {short_name(model)} | {size_text(sizes.get(model))} |"
        if not fitting:
            lines.append(f"{name} none | | | | | |")
            continue
        smallest = min(fitting, key=lambda cell: (hourly_price(cell.slice) or math.inf, by_chip().index(cell.slice)))
        cheapest = min(fitting, key=lambda cell: cell.cost_per_million or math.inf)
        fastest = max(fitting, key=lambda cell: cell.tokens_per_second or 0.0)
        best = (
            *(smallest.slice, marked(smallest, longest_text(smallest))),
            *(cheapest.slice, marked(cheapest, timed(cheapest, cheapest.cost_per_million))),
            *(fastest.slice, marked(fastest, timed(fastest, fastest.tokens_per_second))),
        )
        lines.append(f"{name} {' | '.join(best)} |")
    return "\n".join(lines)


def longest_cell(cell: Cell) -> str:
    if cell.first.failed:
        return "failed"
    if not cell.first.fits:
        return f"no ({longest_text(cell)})" if cell.longest else "no"
    return longest_text(cell) + ("" if cell.base == "bfloat16" else f" {cell.base}")


def timed(cell: Cell, figure: float | None) -> str:
    """A figure that follows from the step time. The sign is for a compiled cell whose time is an estimate."""
    sign = "≈ " if figure is not None and cell.time_is_estimate and not cell.is_estimate else ""
    return sign + significant(figure)


def marked(cell: Cell, words: str) -> str:
    """Estimates are in italics, with a sign."""
    return f"*≈ {words}*" if cell.is_estimate and words else words


def failures(cells: Sequence[Cell]) -> str:
    failed = [cell for cell in cells if cell.first.failed]
    if not failed:
        return ""
    lines = [f"| {short_name(c.model)} | {c.slice} | {_escaped(c.first.problem or '')} |" for c in failed]
    return "\n## Without an answer\n\n| model | slice | reason |\n|---|---|---|\n" + "\n".join(lines) + "\n"


def _escaped(words: str) -> str:
    return text(words).replace("|", "\\|").replace("\n", " ")


def counts_text(cells: Sequence[Cell]) -> str:
    compiled = [cell for cell in cells if not cell.is_estimate]
    num_go = sum(cell.first.fits for cell in cells)
    num_estimates = len(cells) - len(compiled)
    how = "all compiled" if not num_estimates else f"{len(compiled)} compiled and {num_estimates} estimated (≈)"
    models, slices = {cell.model for cell in cells}, {cell.slice for cell in cells}
    return f"{len(models)} models on {len(slices)} TPU slices: {len(cells)} combinations, {how}. {num_go} fit."


def versions_text(steps: Sequence[Step]) -> str:
    """One sentence: what the answers were made with, and how many with each."""
    kinds = {"first": [step for step in steps if not step.is_long], "long": [step for step in steps if step.is_long]}
    made = {kind: Counter(step.made_with.replace("; ", ", ") for step in found) for kind, found in kinds.items()}
    if len({versions for counter in made.values() for versions in counter}) < 2:
        return f"All by one version: {steps[0].made_with}." if steps else ""
    listed = {kind: "; ".join(f"{number} with {by}" for by, number in sorted(c.items())) for kind, c in made.items()}
    longer = f". Longest sequences: {listed['long']}" if listed["long"] else ""
    unknown = sum("trillora" not in step.made_with for step in steps)
    lost = f". Of {unknown} of these {len(steps)} steps, the commit of Trillora was not recorded" if unknown else ""
    return f"They are not all by one version of the program. Steps of {TOKENS} tokens: {listed['first']}{longer}{lost}."


def sources(cells: Sequence[Cell]) -> list[str]:
    """Versions and dates of the answers, with their numbers; for older ones also the models."""
    how = {"compiler": "compiled", "estimate": "estimated"}
    made: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        made.setdefault((cell.first.method, cell.first.made_with), []).append(short_name(cell.model))
    newest = max((versions.rpartition("; ")[2] for _, versions in made), default="")
    lines = []
    for (method, versions), models in sorted(made.items()):
        older = f", by an older version of Trillora: {', '.join(dict.fromkeys(models))}"
        lines.append(f"{len(models)} {how[method]} with {versions}" + ("" if versions.endswith(newest) else older))
    return lines


# ---- HTML

COLUMNS = (
    *("model", "size", "slice", "fits", "longest", "micro-batch", "base", "remat", "GiB", "tokens/s", "of peak"),
    *("hours per M tokens", "$ per M tokens"),
)


def page(cells: Sequence[Cell], steps: Sequence[Step]) -> str:
    """The whole page. Cells carry the value to sort by where it differs from the text."""
    sizes = sizes_of(steps)
    script = _template("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    numbers = {"size", "longest", "micro-batch", "GiB", "tokens/s", "of peak", *COLUMNS[-2:]}
    head = "".join(
        f"<th{' class=number' if name in numbers else ''} aria-sort=none><button type=button>{name}</button></th>"
        for name in COLUMNS
    )
    options = "".join(f"<option>{text(name)}</option>" for name in by_chip())
    notes = "".join(f"<li>{text(line)}</li>" for line in sources(cells))
    return _filled(
        "page.html",
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        style=base_style() + _template("page.css"),
        counts=text(f"{counts_text(cells)} {versions_text(steps)}"),
        tokens=TOKENS,
        prices_of=PRICES_OF,
        options=options,
        head=head,
        rows="\n".join(_row(cell, sizes.get(cell.model)) for cell in cells),
        notes=notes,
        script=script,
    )


def _row(cell: Cell, num_parameters: int | None) -> str:
    about = "≈ " if cell.is_estimate else ""
    limit = config_of(cell.model)["max_position_embeddings"]
    longest_title = "the longest that the model supports" if cell.longest == limit else ""
    share = cell.share_of_peak
    columns = (
        _column(cell.model.lower(), short_name(cell.model), title=cell.model),
        _column(num_parameters, size_text(num_parameters)),
        _column(by_chip().index(cell.slice), cell.slice, kind="slice", title=NOTEBOOKS.get(cell.slice, "")),
        _column(
            cell.verdict, about + cell.verdict, kind="go" if cell.first.fits else "no", title=cell.first.problem or ""
        ),
        _column(cell.longest or None, longest_text(cell), title=longest_title),
        _column(cell.micro_batch, str(cell.micro_batch or "")),
        _column(cell.base, cell.base),
        _column(cell.remat, cell.remat),
        _column(cell.first.peak_gib, significant(cell.first.peak_gib), title=f"of {limit_of(cell.slice):g}"),
        _column(cell.tokens_per_second, timed(cell, cell.tokens_per_second)),
        _column(share, f"{share:.0%}" if share is not None else ""),
        _column(cell.hours_per_million, timed(cell, cell.hours_per_million)),
        _column(cell.cost_per_million, timed(cell, cell.cost_per_million)),
    )
    return f"<tr{' class=estimate' if cell.is_estimate else ''}>{''.join(columns)}</tr>"


def _column(value: float | str | None, shown: str, *, kind: str = "", title: str = "") -> str:
    if kind == "" and not isinstance(value, str):
        kind = "number"
    number = f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)
    attributes = f' class="{kind}"' if kind else ""
    attributes += f' title="{text(title)}"' if title else ""
    return f'<td data-value="{text(number)}"{attributes}>{text(shown)}</td>'
