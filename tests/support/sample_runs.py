"""Generated run folders: two stages, loss spikes, skipped steps, evaluations, JSON answers, one interruption; and runs
that train several adapters together, of which some diverge, stop early or are dropped."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trillora.events import (
    AdapterEnded,
    AdapterStep,
    Evaluated,
    Event,
    Sample,
    Sampled,
    Score,
    Scored,
    Skipped,
    Step,
    to_metrics_line,
)

FINDINGS = [
    ("EBS volume snapshots are publicly shared (AwsEc2Snapshot)", "ec2", "high"),
    ("Root account has no hardware MFA enabled (AwsIamUser)", "iam", "critical"),
    ("Storage account allows shared key access (AzureStorageAccount)", "storage", "medium"),
]


def write_run(folder: Path, num_steps: int = 300, *, seed: int = 0, ended: str = "finished") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    dice, border = random.Random(seed), num_steps * 2 // 5
    metrics = list(_metrics(num_steps, border, dice))
    if ended != "finished":
        metrics = [line for line in metrics if line["step"] <= num_steps * 3 // 5]
    write_lines(folder / "metrics.jsonl", metrics)
    last = max(line["step"] for line in metrics)
    history = [
        ("2026-11-14T09:12:03+00:00", "started", 0, "", "spot-1"),
        ("2026-11-14T09:31:40+00:00", "stopped", border, "SIGTERM: the machine was taken away", "spot-1"),
        ("2026-11-14T09:35:11+00:00", "resumed", border, "", "spot-2"),
    ]
    reasons = {"finished": "", "stopped": "time limit of 30m reached", "diverged": "5 steps in a row were not finite"}
    if ended != "running":
        history.append(("2026-11-14T10:02:57+00:00", ended, last, reasons[ended], "spot-2"))
    keys = ("time", "event", "step", "reason", "machine")
    write_lines(folder / "history.jsonl", [dict(zip(keys, line, strict=True)) for line in history])
    manifest = facts(num_steps, border)
    if ended == "finished":
        best = [line for line in metrics if line["kind"] == "evaluation" and line["is_best"]][-1]
        manifest["adapter"] = {"step": best["step"], "evaluation_loss": best["loss"], "why": ""}
    (folder / "run.json").write_text(json.dumps(manifest), "utf-8")
    (folder / "resolved.yaml").write_text(RECIPE, "utf-8")
    for step in range(50, last + 1, 50):
        _adapter(folder / "checkpoints" / f"step-{step:08d}")
    if ended == "finished":
        _adapter(folder / "adapter")
        (folder / "eval.json").write_text(json.dumps(EVALUATED), "utf-8")
    return folder


def write_lines(file: Path, lines: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def _metrics(num_steps: int, border: int, dice: random.Random) -> Iterable[dict[str, Any]]:
    yield _evaluation(0, "romanian", 3.61, best=True)
    yield _samples(0, "romanian")
    best, started = math.inf, 0
    for step in range(1, num_steps + 1):
        stage, done = (
            ("romanian", step / border) if step <= border else ("chat", (step - border) / (num_steps - border))
        )
        floor, start = (2.45, 3.6) if stage == "romanian" else (0.42, 2.3)
        calm = floor + (start - floor) * math.exp(-5 * done)
        loss: Any = calm * dice.lognormvariate(0, 0.09)
        skipped = False
        if step == num_steps * 7 // 10:
            loss, skipped = "nan", True
        elif step in (num_steps // 4, num_steps * 11 // 20):
            loss = calm + 9.0
        peak = 5e-4 if stage == "romanian" else 2e-4
        rate = peak * min(1.0, done * 10) * 0.5 * (1 + math.cos(math.pi * done))
        started = border if step == border + 1 else started  # the resumed process counts time from its own start
        yield {
            "kind": "step",
            "step": step,
            "stage": stage,
            "loss": loss,
            "num_tokens": 3600 + dice.randrange(400),
            "grad_norm": 1.0,
            "learning_rate": rate,
            "skipped": skipped,
            "padding": 0.04,
            "tokens_per_second": (900.0 if step - started < 2 else 2300.0) * dice.uniform(0.95, 1.05),
            "seconds": 4.1 * (step - started),
            "memory_gib": 3.1 if step < 20 else 3.4,
            "peak_fraction": 0.31,
        }
        if skipped:
            rows = ["findings.jsonl:812", "findings.jsonl:90", "more/part-3.parquet:7"]
            yield {"kind": "skipped", "step": step, "stage": stage, "reason": "the loss was not finite", "rows": rows}
        if step == border:
            yield _evaluation(step, "chat", 2.31, best=True)
        if step % max(num_steps // 12, 1) == 0 or step == num_steps:
            loss = calm * 1.05 + (0.06 * done if stage == "chat" else 0)
            yield _evaluation(step, stage, loss, best=loss < best and stage == "chat")
            best = min(best, loss) if stage == "chat" else math.inf
            yield _samples(step, stage)


PHASES = ("alpaca", "code", "math", "support")
RATES = (1e-5, 3e-5, 1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 3e-3)


def group_plan(kind: str, ranks: Iterable[int] = (16,)) -> list[dict[str, Any]]:
    """The adapters of run.json: four phases, or eight learning rates with each rank."""
    if kind == "phases":
        named = [(name, rate, 16) for name, rate in zip(PHASES, (2e-4, 3e-4, 2e-4, 1e-4), strict=True)]
    else:
        several = len(list(ranks := tuple(ranks))) > 1
        named = [(f"lr-{rate:g}" + (f"-rank-{r}" if several else ""), rate, r) for rate in RATES for r in ranks]
    return [
        {"name": name, "learning_rate": rate, "rank": rank, "alpha": 2.0 * rank, "seed": 0, "num_steps": 0}
        for name, rate, rank in named
    ]


def group_events(kind: str, plan: list[dict[str, Any]], num_steps: int, seed: int = 0) -> Iterable[Event]:
    """The events of a run. The phase "math" diverges, "support" stops early; `auto` drops half of
    the rates three times by their training losses, and evaluates the winner alone."""
    dice, active, every = random.Random(seed), [adapter["name"] for adapter in plan], max(num_steps // 12, 1)
    names, rates = list(active), {adapter["name"]: adapter["learning_rate"] for adapter in plan}
    best = dict.fromkeys(names, math.inf)

    def calm(name: str, step: int) -> float:
        start = 3.2 - 0.25 * names.index(name) if kind == "phases" else 2.9
        speed = 1.0 if kind == "phases" else (rates[name] / 3e-4) ** 0.6
        too_high = 0.35 * max(0.0, math.log10(rates[name] / 4e-4)) if kind != "phases" else 0.0
        return start * (0.45 + 0.55 * math.exp(-4 * speed * step / num_steps)) + too_high * step / num_steps

    for step in range(num_steps + 1):
        for name in active if step else ():
            is_bad = kind == "phases" and name == "math" and step > num_steps * 0.55
            loss = calm(name, step) * dice.lognormvariate(0, 0.05) * (1 + 40 * is_bad)
            schedule = min(1.0, 10 * step / num_steps) * 0.5 * (1 + math.cos(math.pi * step / num_steps))
            yield AdapterStep(step, name, loss, rates[name] * schedule, 0.8, is_bad, 900)
        if step:
            speed, memory = 2300.0 * dice.uniform(0.95, 1.05), 3.4
            yield Step(step, num_steps, "all", 2.0, 0.0, 0.8, False, speed, 2.0 * step, 9.0, 0.04, memory, 0.31, 3600)
        if kind == "phases" and step == num_steps * 3 // 5 and "math" in active:
            yield Skipped(step, "math", "the loss was not finite", ("math.jsonl:812",))
            yield AdapterEnded(step, "math", "diverged", "5 steps in a row were bad")
            active.remove("math")
        if kind == "auto" and step in (every, 2 * every, 3 * every):
            for name in sorted(active, key=lambda name: calm(name, step))[len(active) // 2 :]:
                reason = f"training loss {calm(name, step):.4f}, worse than with other learning rates"
                yield AdapterEnded(step, name, "dropped", reason)
                active.remove(name)
        if step % every == 0 or step == num_steps:
            for name in active if kind != "auto" or step == 0 or len(active) == 1 else ():
                loss = calm(name, step) * 1.03
                yield Evaluated(step, name, loss, math.exp(loss), 1 - loss / 5, 5120, step > 0 and loss < best[name])
                best[name] = min(best[name], loss) if step else math.inf
                if kind == "phases":
                    answer = "I think so." if step else "Sure! Here is a long answer"
                    yield Sampled(step, name, (Sample(f"Question about {name}?", answer, "I think so."),))
            if kind == "phases" and step > num_steps * 0.8 and "support" in active:
                yield AdapterEnded(step, "support", "stopped early", "no better loss in 3 evaluations")
                active.remove("support")
    for name in active:
        yield AdapterEnded(num_steps, name, "finished", "")
    if kind == "phases":
        rows = [
            Score(adapter, phase, calm(phase, 0 if adapter == "base" else num_steps) * factor, 0.4 + 0.2 / factor, 5120)
            for adapter in ("base", *names, "merged")
            for phase in names
            for factor in [1.0 if adapter in (phase, "base") else 1.05 if adapter == "merged" else dice.uniform(1.2, 2)]
        ]
        yield Scored(num_steps, "test", tuple(rows))


def write_group_run(
    folder: Path, kind: str, num_steps: int = 120, *, ranks: Iterable[int] = (16,), ended: str = "finished"
) -> Path:
    """A run with `phases`, `sweep` or `learning_rate: auto`."""
    folder.mkdir(parents=True)
    plan = [{**adapter, "num_steps": num_steps} for adapter in group_plan(kind, ranks)]
    events = list(group_events(kind, plan, num_steps))
    if ended != "finished":
        events = [event for event in events if getattr(event, "step", 0) <= num_steps * 2 // 5]
    (folder / "metrics.jsonl").write_text("".join(f"{to_metrics_line(event)}\n" for event in events), "utf-8")
    last = num_steps if ended == "finished" else num_steps * 2 // 5
    started = {"time": "2026-11-16T09:12:03+00:00", "event": "started", "step": 0, "reason": "", "machine": "spot-1"}
    history = [started, {**started, "event": ended, "step": last}] if ended != "running" else [started]
    write_lines(folder / "history.jsonl", history)
    manifest = facts(num_steps, num_steps // 2)
    stage = {**manifest["stages"][1], "first_step": 1, "num_steps": num_steps}
    manifest["stages"] = [
        {
            **stage,
            "name": adapter["name"],
            "learning_rate": adapter["learning_rate"],
            "files": [{**stage["files"][0], "name": f"data/{adapter['name']}.jsonl"}]
            if kind == "phases"
            else stage["files"],
        }
        for adapter in plan
    ]
    manifest["group"] = {"kind": kind, "adapters": plan}
    (folder / "run.json").write_text(json.dumps(manifest), "utf-8")
    (folder / "resolved.yaml").write_text(RECIPE, "utf-8")
    if ended == "finished":
        _write_results(folder, kind, events)
    return folder


def _write_results(folder: Path, kind: str, events: list[Event]) -> None:
    ends = [event for event in events if isinstance(event, AdapterEnded)]
    evaluations = [event for event in events if isinstance(event, Evaluated) and event.step]
    best: dict[str, Evaluated] = {}
    for evaluated in sorted(evaluations, key=lambda e: -e.loss):
        best[evaluated.stage] = evaluated
    winner = None if kind == "phases" else min(best, key=lambda name: best[name].loss)
    adapters = []
    for end in ends:
        of = f"adapters/{end.adapter}" if kind == "phases" else "adapter" if end.adapter == winner else None
        if of is not None:
            _adapter(folder / of)
        result = {"name": end.adapter, "status": end.status, "reason": end.reason, "num_steps": end.step}
        rated = best.get(end.adapter)
        step, loss = (rated.step, rated.loss) if rated else (None, None)
        adapters.append({**result, "best_step": step, "best_loss": loss, "folder": of, "step": step if of else None})
    merged = {"method": "ties", "folder": "adapters/merged", "weights": [1.0] * 4} if kind == "phases" else None
    if merged is not None:
        _adapter(folder / "adapters" / "merged")
    content = {"kind": kind, "best": winner, "adapters": adapters, "merged": merged}
    (folder / "group.json").write_text(json.dumps(content), "utf-8")


def _evaluation(step: int, stage: str, loss: float, *, best: bool) -> dict[str, Any]:
    numbers = {"loss": loss, "perplexity": math.exp(loss), "accuracy": min(0.99, 1 - loss / 5)}
    return {"kind": "evaluation", "step": step, "stage": stage, **numbers, "num_tokens": 5120, "is_best": best}


def _samples(step: int, stage: str) -> dict[str, Any]:
    samples = []
    for title, area, severity in FINDINGS:
        right = json.dumps({"provider": "aws", "area": area, "severity": severity})
        answer = "Sure! Here is what I think about this finding.\n\n1. It is about security.\n2. It is important to ..."
        if step:
            answer = right if area != "storage" else right.replace("medium", "high")
        samples.append({"prompt": f"Finding: {title}\nGive the verdict as JSON.", "answer": answer, "expected": right})
    return {"kind": "samples", "step": step, "stage": stage, "samples": samples}


def _adapter(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(b"\x08" + bytes(7) + b"{}      ")
    config = {"base_model_name_or_path": "smollm2"}  # run.json has the name on the hub
    (folder / "adapter_config.json").write_text(json.dumps(config), "utf-8")


def facts(num_steps: int, border: int) -> dict[str, Any]:
    text = {"name": "data/ro-wiki.txt.zst", "sha256": "5f70bf18a0860070" * 4, "format": "text", "num_rows": 4120}
    chat = {"name": "data/findings.jsonl", "sha256": "9a3b61e0c2d14f55" * 4, "format": "chat", "num_rows": 1500}
    example = [
        ("<|im_start|>", False, True),
        ("user\nFinding: EBS volume snapshots are publicly shared\nGive the verdict as JSON.", False, False),
        ("<|im_end|>", False, True),
        ("\n", False, False),
        ("<|im_start|>", False, True),
        ("assistant\n", False, False),
        ('{"provider": "aws", "area": "ec2", "severity": "high"}', True, False),
        ("<|im_end|>", True, True),
    ]
    pieces = [{"text": text, "trained": trained, "special": special} for text, trained, special in example]
    whole = [{"text": "Munții Apuseni sunt un lanț muntos din Transilvania.", "trained": True, "special": False}]
    counts = {"documents": 4120, "rows": 1020, "tokens": 512_000, "supervised": 511_000, "padding_fraction": 0.02}
    fewer = {"documents": 1350, "rows": 210, "tokens": 104_000, "supervised": 21_000, "padding_fraction": 0.04}
    shape = {"sequence_length": 512, "batch_size": 8, "num_evaluated": 64}
    first = {"name": "romanian", "first_step": 1, "num_steps": border, "learning_rate": 5e-4, "files": [text]}
    second = {"name": "chat", "first_step": border + 1, "num_steps": num_steps - border, "learning_rate": 2e-4}
    environment = {"python": "3.11.9", "system": "Linux 6.1", "jax": "0.10.2", "torch": "2.13.0", "backend": "tpu"}
    return {
        "format": 1,
        "trillora": "0.5.0",
        "started": "2026-11-14T09:12:03+00:00",
        "num_steps": num_steps,
        "model": {
            "name": "smollm2",
            "base_name": "HuggingFaceTB/SmolLM2-135M-Instruct",
            "num_parameters": 134_515_008,
            "num_trained": 4_884_480,
        },
        "environment": {**environment, "device": "TPU v5e", "num_devices": 8, "mesh": {"data": 8}},
        "identity": {"model": "c1" * 32, "tokenizer": "0d" * 32, "data": "77" * 32, "revision": "ab" * 20},
        "stages": [
            {**first, **shape, "data": counts, "example": whole},
            {**second, **shape, "data": fewer, "example": pieces, "files": [chat]},
        ],
    }


EVALUATED = {
    "data": "data/findings-test.jsonl",
    "num_rows": 200,
    "base": {
        "loss": 2.34,
        "perplexity": 10.4,
        "accuracy": 0.51,
        "exact_match": 0.0,
        "valid_json": 0.02,
        "right_fields": 0.0,
        "fields": {"provider": 0.0, "area": 0.0, "severity": 0.0},
    },
    "adapter": {
        "loss": 0.44,
        "perplexity": 1.55,
        "accuracy": 0.91,
        "exact_match": 0.41,
        "valid_json": 1.0,
        "right_fields": 0.995,
        "fields": {"provider": 0.97, "area": 0.78, "severity": 0.52},
    },
    "majority": {"provider": 0.44, "area": 0.1, "severity": 0.47},
    "examples": [
        {
            "prompt": "Finding: S3 bucket policy allows public read",
            "expected": '{"provider": "aws", "area": "s3", "severity": "high"}',
            "base": "The S3 bucket policy is a policy that",
            "adapter": '{"provider":"aws","area":"s3","severity":"high"}',
        }
    ],
}

RECIPE = """# trillora 0.5.0: every option of this run
model:
  name: HuggingFaceTB/SmolLM2-135M-Instruct
  dtype: bfloat16        # the chip computes fastest in it
stages:
  - {name: romanian, data: data/ro-wiki.txt.zst, learning_rate: 5e-4}
  - {name: chat, data: data/findings.jsonl, learning_rate: 2e-4}
lora:
  rank: 16
  alpha: 32
train:
  batch_size: 8
  micro_batch_size: 4    # the largest that fits
"""
