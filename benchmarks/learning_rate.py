"""A sweep of eight learning rates and `learning_rate: auto`, on real data sets.

    python tools/real_data.py --fetch-only prowler evals-soc-codes
    python benchmarks/learning_rate.py prowler evals-soc-codes --steps 300 --out FOLDER

Trains the embedded model by the recipes in recipes/real/. For each set it prints the held-out loss of every rate at the
end of its schedule, the rate that `auto` chose, its loss, and its cost in steps of one adapter. `--out` keeps the runs,
with the losses of every step in metrics.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", metavar="SET", help="names of recipes in recipes/real/")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, help="where tools/real_data.py put the files")
    parser.add_argument("--out", type=Path, help="keep the runs here")
    parser.add_argument("--only", choices=["sweep", "auto"], help="run only this one")
    parser.add_argument("overrides", nargs="*", help=argparse.SUPPRESS)
    args, overrides = parser.parse_known_args()
    args.overrides = overrides
    out = args.out or Path(tempfile.mkdtemp(prefix="trillora-rates-"))
    for name in args.sets:
        if args.only != "auto":
            print(json.dumps({"set": name, "sweep": sweep(name, args, out / f"{name}-sweep")}), flush=True)
        if args.only != "sweep":
            print(json.dumps({"set": name, "auto": auto(name, args, out / f"{name}-auto")}), flush=True)


def sweep(name: str, args: argparse.Namespace, out: Path) -> dict[str, Any]:
    from trillora.recipe.group import AUTO_RATES

    _, seconds = run(name, args, out, {"sweep": {"learning_rate": list(AUTO_RATES), "keep": "best"}})
    losses = last_losses(out)
    return {"seconds": seconds, "last loss": losses, "best": min(losses, key=losses.__getitem__)}


def auto(name: str, args: argparse.Namespace, out: Path) -> dict[str, Any]:
    summary, seconds = run(name, args, out, {"train.learning_rate": "auto"})
    cost = sum(adapter["num_steps"] for adapter in summary["adapters"])
    loss = last_losses(out)[summary["best"]]
    return {"seconds": seconds, "rate": summary["best"], "last loss": loss, "steps": cost, "cost": cost / args.steps}


def run(name: str, args: argparse.Namespace, out: Path, options: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """The run's group.json, and the seconds of training without the start."""
    from real_data import SETS, default_folder

    import trillora.recipe.yaml as yaml
    from trillora.recipe.load import load_recipe
    from trillora.training.trainer import train

    real_set = next(one for one in SETS if one.name == name)
    file = ROOT / "recipes" / "real" / f"{name}.yaml"
    recipe = dict(yaml.parse(file.read_text(), str(file)))
    section = {**recipe["data"], "path": str((args.folder or default_folder()) / real_set.file)}
    recipe |= {"data": {**section, "split": {"validation": 0.1, "test": 0.1}}}
    values: dict[str, Any] = {
        "train.steps": args.steps,
        "train.batch_size": 8,
        "train.sequence_length": 512,
        "train.warmup_steps": args.steps // 30,
        "data.on_too_long": "drop" if name != "chitchat" else "split",
        "evaluate.num_samples": 0,
        "evaluate.every_steps": max(args.steps // 10, 1),
        "evaluate.keep_best": False,
        **options,
    }
    for text in args.overrides:
        key, _, value = text.removeprefix("--set=").partition("=")
        values[key] = yaml.parse(value, key)
    started = time.perf_counter()
    train(load_recipe(recipe, values), out, listener=show)
    print(f"{name}: {time.perf_counter() - started:.0f} s in all", file=sys.stderr, flush=True)
    seconds = [json.loads(line)["seconds"] for line in (out / "metrics.jsonl").open() if '"kind": "step"' in line]
    return json.loads((out / "group.json").read_text()), seconds[-1]


def last_losses(out: Path) -> dict[str, float]:
    """The held-out loss of each adapter after its last step."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    found = {line["stage"]: (line["step"], line["loss"]) for line in lines if line["kind"] == "evaluation"}
    last = max(step for step, _ in found.values())
    return {name: float(loss) for name, (step, loss) in found.items() if step == last}


def show(event: Any) -> None:
    from trillora.events import Alarm, Chosen, Note

    if isinstance(event, Note | Alarm | Chosen):
        print(event, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
