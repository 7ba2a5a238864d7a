"""The report of a run as one HTML file: no scripts, no requests, light or dark like the reader's system."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trillora.data.excerpt import shortened
from trillora.model.loading.description import EMBEDDED_NOTE
from trillora.model.loading.wrapper import MULTIMODAL, TEXT
from trillora.own_command import runnable
from trillora.recipe.schema import EMBEDDED
from trillora.report.html import card, coloured, document, text, tiles
from trillora.report.numbers import (
    format_duration,
    format_number,
    format_percent,
    format_rate,
    format_short,
    format_time,
)
from trillora.report.run import adapter_tables, charts, results, test_set
from trillora.report.run.adapter_curves import adapter_curves, style_of
from trillora.report.run.adapters import MAX_ADAPTERS
from trillora.report.run.curves import curves
from trillora.report.run.parse import count, words
from trillora.report.run.read import RunRecord, StageRecord
from trillora.report.run.status import RunStatus, before_and_after, quoted, run_status, seen_from_here, total_seconds
from trillora.runs.files import ADAPTER, CHECKPOINTS
from trillora.secrets import mask_secrets, secrets_of_environment

MAX_LISTED = 50  # lines of a table
MAX_RECIPE = 60_000  # characters
_ADDED_TOKENS = re.compile(r"^tokens: *(\[.|\n *-)", re.MULTILINE)  # in the recipe
TIME_FORMAT = "%d %b, %H:%M"  # the head of the page has the year

STYLE = """
.verdict.stopped, .verdict.running { border-left-color: var(--edge); }
.verdict.diverged { border-left-color: var(--bad); }
.verdict pre { font-weight: 400; } pre.code { white-space: pre; overflow-x: auto; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(9.4rem, 1fr)); }
.tile small { font-size: .95rem; font-weight: 400; color: var(--faint); }
.tile b { white-space: nowrap; }
.parts > section { min-width: 0; }
h3 { font-size: .95rem; margin: 1.2rem 0 .4rem; overflow-wrap: anywhere; }
h1 { overflow-wrap: anywhere; line-height: 1.25; }
details { margin-top: .9rem; } details > .sample { margin-top: .9rem; }
summary { cursor: pointer; color: var(--faint); }
summary h2 { display: inline; color: var(--text); }
details.card { margin-top: 1rem; }
.facts th { overflow-wrap: anywhere; padding-right: 1rem; }
td code { white-space: nowrap; } td.name code { white-space: normal; }
td.moment { white-space: nowrap; }
footer { margin-top: 1.5rem; font-size: .85rem; }
@media (max-width: 32rem) { .facts th { width: 6.5rem; } td.name { min-width: 6.5rem; }
  .scores td.number { min-width: 3.6rem; } .scores th.number { white-space: normal; } td, th { padding-right: .6rem; }
  .card, .verdict { padding: .85rem .85rem; } .tiles { gap: .5rem; } .tile b { font-size: 1.2rem; } }
@media print { .prompt, .says pre { max-height: none; } body { background: none; } }
"""


def page(run: RunRecord) -> str:
    title = f"{_model_name(run)} on {_data_name(run)}" if _data_name(run) else _model_name(run)
    facts = [format_time(run.manifest.started), _machine(run)]
    stages = _distinct(run.manifest.stages[:MAX_ADAPTERS])[:MAX_LISTED] if run.adapters else run.manifest.stages
    body = "\n".join(
        (
            f'<h1>{text(title)}</h1>\n<div class="faint">{text(" · ".join(fact for fact in facts if fact))}</div>',
            _status(run_status(run)),
            tiles(_tiles(run)),
            *([card("Adapters", adapter_tables.adapters_table(run))] if run.adapters else []),
            card("Curves", adapter_curves(run) if run.adapters else curves(run)),
            *([card("Scores of every adapter on every phase", adapter_tables.scores_table(run))] if run.scored else []),
            card("Answers before and after", results.samples(run)),
            card("Test set", test_set.test_set(run)),
            card("Data", "".join(_stage(stage, len(stages) > 1) for stage in stages)),
            card("Skipped steps", _skips(run)),
            card("Use the result", _use(run)),
            card("History", _history(run)),
            _folded("Environment", _facts(run.manifest.environment)),
            _folded("Model and data", _facts({**_model_facts(run), **run.manifest.identity})),
            _folded("Resolved recipe", _recipe(run)),
            _footer(run),
        )
    )
    more_style = adapter_tables.STYLE + style_of(run) if run.adapters else ""
    return document(title, body, charts.STYLE + results.STYLE + test_set.STYLE + STYLE + more_style)


def _distinct(stages: Iterable[StageRecord]) -> list[StageRecord]:
    """One stage for all adapters that train on the same rows, as those of a sweep do."""
    found: list[tuple[StageRecord, list[StageRecord]]] = []  # what they share, and the stages
    for stage in stages:
        shared = replace(stage, name="", learning_rate=None)
        alike = next((alike for other, alike in found if other == shared), None)
        if alike is None:
            found.append((shared, alike := []))
        alike.append(stage)
    return [
        alike[0]
        if len(alike) == 1
        else replace(shared, name=", ".join(stage.name for stage in alike[:3]) + _and_more(len(alike) - 3))
        for shared, alike in found
    ]


def _model_name(run: RunRecord) -> str:
    model = run.manifest.model
    name = words(model.get("base_name")) or run.folder.resolve().name
    return name.rstrip("/").rpartition("/")[2] or name


def _data_name(run: RunRecord) -> str:
    names = list(dict.fromkeys(Path(file.name).name for stage in run.manifest.stages for file in stage.files))
    shown = ", ".join(names[:2])
    return f"{shown} and {len(names) - 2:,} more" if len(names) > 2 else shown


def _machine(run: RunRecord) -> str:
    environment = run.manifest.environment
    device = words(environment.get("device")) or words(environment.get("backend"))
    num_devices = count(environment.get("num_devices")) or 1
    return f"{num_devices} x {device}" if device and num_devices > 1 else device


def _status(status: RunStatus) -> str:
    more = "".join(f"<p>{text(line)}</p>" for line in status.more)
    command = f"<pre>{text(status.command)}</pre>" if status.command else ""
    return f'<div class="verdict {status.kind}">{text(status.what)}{more}{command}</div>'


def _tiles(run: RunRecord) -> list[tuple[str, str, bool]]:
    facts: list[tuple[str, str, bool]] = []
    pair = before_and_after(run)
    if pair is not None:
        before, after = pair
        facts.append((_change(format_number(before.loss), format_number(after.loss)), "evaluation loss", False))
        facts.append((_change(format_number(before.perplexity), format_number(after.perplexity)), "perplexity", False))
        if math.isfinite(before.accuracy) and math.isfinite(after.accuracy):
            shares = (format_percent(round(share, 2)) for share in (before.accuracy, after.accuracy))
            facts.append((_change(*shares), "token accuracy", False))
    elif run.steps:
        losses = (format_number(step.loss) for step in (run.steps[0], run.steps[-1]))
        facts.append((_change(*losses), "mean training loss" if run.adapters else "training loss", False))
    steps = [step for adapter in run.adapters for step in adapter.steps] or run.steps
    tokens, seconds = sum(step.num_tokens for step in steps), total_seconds(run.steps)
    if tokens:
        facts.append((format_short(tokens), "tokens trained on", False))
    if seconds:
        facts.append((format_duration(seconds), "training time", False))
    if speeds := _known(step.tokens_per_second for step in run.steps):
        facts.append((format_short(statistics.median(speeds)), "tokens per second", False))
    if peaks := _known(step.peak_fraction for step in run.steps):
        facts.append((format_percent(statistics.median(peaks)), "of peak FLOP/s", False))
    if memory := _known(step.memory_gib for step in run.steps):
        facts.append((f"{format_number(max(memory))} <small>GiB</small>", "memory", False))
    skipped = max(sum(step.skipped for step in steps), len(run.skips))
    if run.steps:
        facts.append((f"{skipped:,}", "skipped steps", skipped > 0))
    return facts


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value and math.isfinite(value)]


def _change(before: str, after: str) -> str:
    return f"<small>{text(before)} →</small> {text(after)}"


def _stage(stage: StageRecord, is_one_of_many: bool) -> str:
    title = f"<h3>{text(stage.name)}</h3>" if is_one_of_many else ""
    plan = [
        f"{stage.num_steps:,} steps" if stage.num_steps else "",
        f"of {stage.batch_size:,} sequences" if stage.batch_size else "",
        f"of {stage.sequence_length:,} tokens" if stage.sequence_length else "",
        f"learning rate {format_rate(stage.learning_rate)}" if stage.learning_rate is not None else "",
    ]
    labels = {"documents": "documents", "rows": "sequences", "tokens": "tokens"}
    counts = [f"{int(stage.data[name]):,} {label}" for name, label in labels.items() if name in stage.data]
    counts += [f"{stage.num_evaluated:,} evaluation documents"] if stage.num_evaluated else []
    plan_text = " ".join(part for part in plan[:3] if part) + (f", {plan[3]}" if plan[3] else "")
    lines = "".join(f'<div class="faint">{text(line)}</div>' for line in (plan_text, ", ".join(counts)) if line)
    example = f"<h3>One training document</h3>{coloured(shortened(stage.example))}" if stage.example else ""
    return f"{title}{lines}{_token_bar(stage.data)}{_files(stage)}{example}"


def _token_bar(counts: dict[str, float]) -> str:
    tokens, trained = counts.get("tokens", 0), counts.get("supervised", 0)
    padding = min(counts.get("padding_fraction", 0), 0.999)
    if not tokens:
        return ""
    parts = {"trained": trained, "masked": max(tokens - trained, 0), "padded": tokens * padding / (1 - padding)}
    total = sum(parts.values())
    names = {"trained": "trained", "masked": "context", "padded": "padding"}
    bars = "".join(f'<div class="{n}-fill" style="width:{c / total:.3%}"></div>' for n, c in parts.items())
    key = "".join(
        f'<span><i class="{n}-fill"></i>{names[n]} {format_short(c)} ({c / total:.1%})</span>' for n, c in parts.items()
    )
    return f'<div class="stack" style="margin-top:.7rem">{bars}</div><div class="key">{key}</div>'


def _files(stage: StageRecord) -> str:
    if not stage.files:
        return ""
    head = '<tr><th>file</th><th>format</th><th class="number">rows</th><th>sha256</th></tr>'
    lines = "".join(
        f'<tr><td class="name">{text(file.name)}</td><td>{text(file.format)}</td>'
        f'<td class="number">{"" if file.num_rows is None else f"{file.num_rows:,}"}</td>'
        f"<td><code>{text(file.sha256[:12])}</code></td></tr>"
        for file in stage.files[:MAX_LISTED]
    )
    return f'<div class="scroll" style="margin-top:.7rem"><table>{head}{lines}</table></div>{_rest(len(stage.files))}'


def _skips(run: RunRecord) -> str:
    if not run.skips:
        return ""
    part = "adapter" if run.adapters else "stage"
    head = f'<tr><th class="number">step</th><th>{part}</th><th>reason</th><th>rows</th></tr>'
    lines = "".join(
        f'<tr><td class="number">{skip.step:,}</td><td>{text(skip.stage)}</td><td class="name">{text(skip.reason)}</td>'
        f'<td class="name"><code>{text(", ".join(skip.rows[:20]))}{_and_more(len(skip.rows) - 20)}</code></td></tr>'
        for skip in run.skips[:MAX_LISTED]
    )
    note = '<div class="faint">Skipped steps do not change the adapter or the optimizer state.</div>'
    return f'{note}<div class="scroll"><table>{head}{lines}</table></div>{_rest(len(run.skips))}'


def _use(run: RunRecord) -> str:
    if run.adapter is None:
        return ""
    folder = run.folder / run.adapter
    is_checkpoint = run.adapter.startswith(CHECKPOINTS)
    newest = " This is the newest checkpoint; the run is not finished." if is_checkpoint else ""
    code = _load_code(run, folder)
    is_one_of_many = run.adapters and run.adapter != ADAPTER and not is_checkpoint
    chat = runnable(f"trillora chat {quoted(folder if is_one_of_many else run.folder)}")
    copied = f"<p>{EMBEDDED_NOTE}</p>" if run.manifest.model.get("name") == EMBEDDED else ""
    return (
        f"<div>Chat with it:</div><pre>{text(chat)}</pre>"
        f"<p>Load it in Python; the adapter is in PEFT's format.{newest}</p>"
        f'<pre class="code">{text(code)}</pre>{copied}'
    )


def _load_code(run: RunRecord, folder: Path) -> str:
    """Python code that loads the adapter. With absolute paths it runs from any directory."""
    base = os.path.abspath(run.base) if os.path.isdir(run.base) else run.base
    adapter = mask_secrets(os.path.abspath(folder), secrets_of_environment())
    has_tokenizer = (folder / "tokenizer_config.json").is_file()  # not in a checkpoint
    base, adapter = (json.dumps(name, ensure_ascii=False) for name in (base, adapter))
    grown = "base.resize_token_embeddings(len(tokenizer))  # the run added tokens\n"
    grown = grown if _ADDED_TOKENS.search(run.recipe) else ""
    kind = MULTIMODAL if run.is_multimodal else TEXT
    return f"""from peft import PeftModel
from transformers import {kind}, AutoTokenizer

base = {kind}.from_pretrained({base}, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained({adapter if has_tokenizer else base})
{grown}model = PeftModel.from_pretrained(base, {adapter})"""


def _history(run: RunRecord) -> str:
    lines = "".join(
        f'<tr><td class="moment">{text(format_time(entry.time, TIME_FORMAT))}</td>'
        f"<td>{text(entry.event)}</td>"
        f'<td class="number">{"" if entry.step is None else f"{entry.step:,}"}</td>'
        f'<td class="name">{text(entry.reason)}</td><td>{text(entry.machine)}</td></tr>'
        for entry in run.history[-MAX_LISTED:]
    )
    head = '<tr><th>time</th><th></th><th class="number">step</th><th>reason</th><th>machine</th></tr>'
    table = f'<div class="scroll"><table>{head}{lines}</table></div>{_rest(len(run.history))}' if lines else ""
    unreadable = f'<p class="faint">{run.num_unreadable:,} log lines are unreadable.</p>'
    return table + (unreadable if run.num_unreadable else "")


def _model_facts(run: RunRecord) -> dict[str, Any]:
    model = run.manifest.model
    facts: dict[str, Any] = {"base model": words(model.get("base_name"))}
    total, trained = count(model.get("num_parameters")), count(model.get("num_trained"))
    if total:
        facts["parameters"] = f"{total:,}"
    if trained:
        facts["trained parameters"] = f"{trained:,}" + (f" ({trained / total:.2%})" if total else "")
    facts["arithmetic"] = words(model.get("arithmetic"))
    return facts


def _facts(facts: dict[str, Any]) -> str:
    lines = "".join(
        f'<tr><th>{text(str(name))}</th><td class="name">{text(_plain(value))}</td></tr>'
        for name, value in list(facts.items())[: 2 * MAX_LISTED]
        if value not in (None, "")
    )
    return f'<div class="scroll"><table class="facts">{lines}</table></div>' if lines else ""


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(inner)}" for name, inner in value.items())
    return ", ".join(_plain(inner) for inner in value) if isinstance(value, list) else str(value)


def _recipe(run: RunRecord) -> str:
    if not run.recipe.strip():
        return ""
    rest = len(run.recipe) - MAX_RECIPE
    cut = f'\n<span class="gap">[… {rest:,} more characters in resolved.yaml …]</span>' if rest > 0 else ""
    return f'<pre class="code">{text(run.recipe[:MAX_RECIPE].rstrip())}{cut}</pre>'


def _folded(title: str, content: str) -> str:
    return f'<details class="card"><summary><h2>{text(title)}</h2></summary>{content}</details>' if content else ""


def _rest(length: int) -> str:
    return f'<p class="faint">{_and_more(length - MAX_LISTED)}</p>' if length > MAX_LISTED else ""


def _and_more(rest: int) -> str:
    return f" … and {rest:,} more" if rest > 0 else ""


def _footer(run: RunRecord) -> str:
    version = f"Trillora {run.manifest.trillora}".rstrip()
    return f'<footer class="faint">{text(version)} · {text(seen_from_here(run.folder))}</footer>'
