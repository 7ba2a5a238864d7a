"""Guarantees for complete runs: a poisonous batch, long runs, no pickle, secrets, file names.

tools/soak.py has the table of all guarantees and their tests.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import psutil
import pytest
import tiny_run
from canaries import SECRETS
from dose import FULL, dose, full_dose_only, log_progress
from run_process import WAIT, trillora
from tiny_run import checkpoints_of, metrics

from trillora.data.stage import read_stage
from trillora.errors import TrilloraError
from trillora.events import Alarm, Skipped, Step, ignore_events
from trillora.model.loading.source import load_tokenizer
from trillora.recipe.load import load_recipe
from trillora.recipe.schema import stages_of
from trillora.training.trainer import train

pytestmark = pytest.mark.usefixtures("shared_steps")

Record = Callable[[str, object], None]
COMPILE = "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("small"), tiny_run.llama(num_layers=1, width=32), num_rows=400)


# One poisonous batch

POISONED = 30  # its step; the first steps only collect what gradient norm is usual


def last_loss(run: Path) -> float:
    return metrics(run, "evaluation")[-1]["loss"]


@full_dose_only  # test_faults.py and test_divergence.py have the rules
@pytest.mark.parametrize("outcome", ["clipped", "skipped"])
def test_a_poisonous_batch_is_clipped_or_skipped_and_does_no_harm(
    tmp_path: Path, outcome: str, record_property: Record
) -> None:
    """Less than one epoch, so every row is used once. A step is skipped if its gradient norm is twenty times the usual
    one. With equal answers the usual gradients are small, and this batch is far above that limit."""
    tiny_run.write_both(tmp_path, num_rows=400)
    rows = (tmp_path / "chats.jsonl").read_text().splitlines()
    if outcome == "skipped":
        rows = [re.sub(r"It is.*?\"", 'Yes."', row) for row in rows]
        (tmp_path / "chats.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "held-out.jsonl").write_text("\n".join(rows[:30]) + "\n")
    settings = tiny_run.recipe(
        tmp_path,
        data={"pack": False, "validation": str(tmp_path / "held-out.jsonl")},
        lora={"rank": 8, "alpha": 16},
        train={"steps": 40},
        evaluate={"every_steps": 40, "num_samples": 0},
    )
    train(load_recipe(settings), tmp_path / "clean")
    assert not metrics(tmp_path / "clean", "skipped")

    (stage,) = stages_of(load_recipe(settings))
    met = read_stage(stage, load_tokenizer(tmp_path / "model"), ignore_events).places_of(POISONED - 1)
    lines = [int(place.rpartition(":")[2]) for place in met]
    assert len(lines) == 8
    for line in lines:
        row = json.loads(rows[line - 1])
        row["messages"][-1]["content"] = "~|" * 10
        rows[line - 1] = json.dumps(row)
    (tmp_path / "poisoned.jsonl").write_text("\n".join(rows) + "\n")
    settings["data"]["path"] = str(tmp_path / "poisoned.jsonl")
    train(load_recipe(settings), tmp_path / "poisoned")

    steps, before = metrics(tmp_path / "poisoned", "step"), metrics(tmp_path / "clean", "step")
    assert steps[: POISONED - 1] == before[: POISONED - 1], "only that batch differs"
    bad, good = steps[POISONED - 1], before[POISONED - 1]
    usual = statistics.median(line["grad_norm"] for line in before[POISONED - 11 : POISONED - 1])
    assert bad["loss"] > 1.25 * good["loss"] and bad["grad_norm"] > 2 * usual, "the batch is poisonous"
    skipped = metrics(tmp_path / "poisoned", "skipped")
    if outcome == "clipped":
        assert bad["grad_norm"] > 1.0 and not skipped
    else:
        assert [(line["step"], len(line["rows"])) for line in skipped] == [(POISONED, 8)]
        assert all(any(place.endswith(f":{line}") for line in lines) for place in skipped[0]["rows"])
    # One wrong step of 40, clipped to the length of the others, changes the loss of clean rows only little.
    ratio = last_loss(tmp_path / "poisoned") / last_loss(tmp_path / "clean")
    assert ratio < 1.1
    record_property("poisonous batch", outcome)
    record_property("gradient norm relative to the usual", round(bad["grad_norm"] / usual, 1))
    record_property("loss of clean rows relative to a clean run", round(ratio, 3))


NUM_CLEAN = 100 if FULL else 50  # steps


@pytest.mark.parametrize("seed", range(dose(1, 10)))
def test_clean_runs_raise_no_alarm(folder: Path, tmp_path: Path, seed: int, record_property: Record) -> None:
    settings = tiny_run.recipe(folder, train={"steps": NUM_CLEAN, "seed": seed}, lora={"dropout": 0.1})
    alarms: list[str] = []
    result = train(
        load_recipe(settings),
        tmp_path / "run",
        listener=lambda event: alarms.append(event.text) if isinstance(event, Alarm | Skipped) else None,
    )
    assert not alarms and len(result.losses) == NUM_CLEAN and result.losses[-1] < result.losses[0]
    assert not metrics(tmp_path / "run", "skipped")
    record_property("clean seeds", 1)


@pytest.mark.parametrize("seed", range(dose(1, 9)))
def test_rows_that_cannot_be_learned_are_no_divergence(
    folder: Path, tmp_path: Path, seed: int, record_property: Record
) -> None:
    """Half of the answers are soon known by heart, the other half are random keys. With one row in a batch, many hard
    ones follow each other."""
    generator, rows = random.Random(3), []
    for number in range(600):
        key = "".join(generator.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(20))
        question, answer = ("Key?", key) if number % 2 else ("Say it.", "yes yes yes yes yes")
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append(json.dumps({"messages": turns}))
    (tmp_path / "two.jsonl").write_text("\n".join(rows) + "\n")
    rate = [0.003, 0.01, 0.001][seed % 3]
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    settings = tiny_run.recipe(
        folder,
        data={"path": str(tmp_path / "two.jsonl"), "pack": False},
        lora={"rank": 16, "alpha": 64, "targets": targets},
        train={"steps": dose(300, 6000), "batch_size": 1, "seed": seed, "learning_rate": rate},
    )
    losses = train(load_recipe(settings), tmp_path / "run").losses
    assert min(losses) < 0.5 and max(losses[-50:]) > 3.0, "both kinds of rows are met"
    record_property("runs with random keys", 1)


# Long runs

NUM_STEPS = dose(200, 10_000)


@dataclass
class Watch:
    """Observes its own process during training."""

    checkpoints: Path
    steps: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)  # bytes
    handles: list[int] = field(default_factory=list)
    num_checkpoints: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of every step
    num_compiles: int = 0  # between the first step and the last
    is_training: bool = False

    def listen(self, event: Any) -> None:
        if not isinstance(event, Step):
            return
        self.is_training = event.step < event.num_steps
        self.times.append(time.perf_counter())
        if event.step % max(1, event.num_steps // 1000) == 0:
            process = psutil.Process()
            self.steps.append(event.step)
            self.memory.append(process.memory_info().rss)
            self.handles.append(process.num_fds())
            visible = [path for path in self.checkpoints.glob("step-*") if path.is_dir()]
            self.num_checkpoints.append(len(visible))
        if event.step % 500 == 0:
            log_progress(f"step {event.step} of {event.num_steps}: {self.memory[-1] / 2**20:.0f} MiB")

    def count_compile(self, event: str, duration: float, **rest: Any) -> None:
        self.num_compiles += self.is_training and event == COMPILE

    def between(self, values: list[int], first: int, last: int) -> list[int]:
        return [value for step, value in zip(self.steps, values, strict=True) if first <= step <= last]

    def step_seconds(self, first: int, last: int) -> float:
        times = self.times[first - 1 : last]
        return statistics.median(b - a for a, b in itertools.pairwise(times))


def test_a_long_run_stays_as_it_began(folder: Path, tmp_path: Path, record_property: Record) -> None:
    """One compilation, a constant number of file handles, and old checkpoints are removed. With TRILLORA_DOSE=full also
    constant memory, which a short run does not reach."""
    settings = tiny_run.recipe(
        folder,
        data={"validation": str(folder / "chats.jsonl")},
        train={"steps": NUM_STEPS, "batch_size": 1, "checkpoint_every": NUM_STEPS // 100 or 1, "learning_rate": 1e-4},
        evaluate={"every_steps": NUM_STEPS // 3, "num_samples": 0, "max_documents": 8},
    )
    watch = Watch(tmp_path / "run" / "checkpoints")
    jax.monitoring.register_event_duration_secs_listener(watch.count_compile)
    result = train(load_recipe(settings), tmp_path / "run", listener=watch.listen)
    assert len(result.losses) == NUM_STEPS and result.num_compiles == 1
    assert watch.num_compiles == 0, "nothing is compiled after the first step"
    tenth = NUM_STEPS // 10
    first, last = (tenth, 2 * tenth), (NUM_STEPS - tenth, NUM_STEPS)
    # The minimum, because a background save has files open.
    handles = [min(watch.between(watch.handles, *span)) for span in (first, last)]
    assert handles[0] == handles[1]
    assert max(watch.num_checkpoints) <= 3, "two, and one that is being removed"
    assert len(checkpoints_of(tmp_path / "run").steps()) <= 3
    size = sum(path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file())
    memory = [statistics.median(watch.between(watch.memory, *span)) for span in (first, last)]
    seconds = [watch.step_seconds(*span) for span in (first, last)]
    record_property("steps", NUM_STEPS)
    record_property("memory growth, %", round(100 * (memory[1] / memory[0] - 1), 2))
    record_property("file handles", f"{handles[0]} then {handles[1]}")
    record_property("compiles after the first step", watch.num_compiles)
    record_property("run folder, MiB", round(size / 2**20, 1))
    record_property("step", f"{1000 * seconds[0]:.1f} then {1000 * seconds[1]:.1f} ms")
    if NUM_STEPS >= 10_000:
        assert memory[1] < 1.02 * memory[0]
        assert size < 100 * 2**20
        # Medians of a thousand steps each; other load on the machine causes the rest.
        assert seconds[1] < 1.5 * seconds[0]


# What a run reads, prints and writes

IN_ADDRESS = "canary-in-an-address-5150"
STARTUP = Path(__file__).parents[1] / "support" / "startup"
# Special characters of shells, HTML, paths, terminals, YAML and logs.
DATA_NAME = "$(touch owned);`id` <b>&amp; ..%2f..%2fup\\..\\..\\x\u202e\n- a: 'b' é.jsonl"
RUN_NAME = "run ..%2fup $(touch owned) <i>'\"\n#"


@dataclass(frozen=True)
class Watched:
    """`train`, `eval` and `generate` as audited processes, with secrets in their environment."""

    place: Path
    run: Path
    outputs: list[str]
    audit: list[list[str]]


@pytest.fixture(scope="module")
def watched(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    place = tmp_path_factory.mktemp("watched")
    audit, run = place / "audit", place / "inner" / RUN_NAME
    (place / "data").mkdir()
    rows = (folder / "chats.jsonl").read_text().splitlines()[:40]
    data = place / "data" / DATA_NAME
    data.write_text("\n".join(rows) + "\n")
    settings = tiny_run.recipe(
        folder,
        data={"path": str(place / "data"), "split": {"validation": 0.2, "test": 0.2}},
        train={"steps": 4, "checkpoint_every": 2},
        evaluate={"every_steps": 2, "num_samples": 1, "max_tokens": 4},
    )
    (place / "recipe.yaml").write_text(json.dumps(settings))
    environment = {
        **SECRETS,
        "TRILLORA_AUDIT": str(audit),
        "TRILLORA_CACHE": str(place / "cache"),
        "HF_HOME": str(place / "cache" / "hub"),  # the doctor tries whether it can be written
        "PYTHONPATH": os.pathsep.join([str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    before = tree(place)
    in_address = f"train.checkpoint_dir=memory://me:{IN_ADDRESS}@bucket/run"
    outputs = []
    for arguments in (
        ["train", str(place / "recipe.yaml"), "--out", str(run)],
        ["train", str(place / "recipe.yaml"), in_address, "--out", str(place / "inner" / "addressed"), "--json"],
        ["eval", str(run), "--max-tokens", "4"],
        ["generate", str(run), "--prompt", "What is 3 plus 4?", "--max-tokens", "4"],
        *([["inspect", str(place / "recipe.yaml")], ["report", str(run)], ["doctor"]] if FULL else []),
    ):
        process = trillora(*arguments, environment=environment, cwd=place / "data")
        output, errors = process.communicate(timeout=WAIT)
        assert process.returncode == 0, errors
        outputs.append(output + errors)
        log_progress(f"watched: {arguments[0]}")
    lines = [line.split("\t") for line in audit.read_text("utf-8").splitlines()]
    changed = {path for path in tree(place) - before if path.parts[0] not in ("inner", "cache", "audit")}
    assert not changed, "something was written outside the run"
    return Watched(place, run, outputs, lines)


def tree(place: Path) -> set[Path]:
    return {path.relative_to(place) for path in place.rglob("*")}


@full_dose_only
def test_no_file_is_unpickled_by_a_whole_run(watched: Watched, record_property: Record) -> None:
    """Only Python's multiprocessing may use pickle, to send objects through pipes."""
    starts = [line for line in watched.audit if line[0] == "start"]
    assert len(starts) >= 4, "every process was audited"
    found = [line for line in watched.audit if line[0] == "unpickle" and "multiprocessing" not in line[-1]]
    assert not found, found[:5]
    record_property("processes watched", len(starts))
    record_property("unpickled", len(found))


def test_the_audit_sees_an_unpickling(tmp_path: Path) -> None:
    """Checks that the test above can fail."""
    environment = {**os.environ, "TRILLORA_AUDIT": str(tmp_path / "audit"), "PYTHONPATH": str(STARTUP)}
    code = "import pathlib, pickle; pickle.loads(pickle.dumps(pathlib.Path('x')))"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    text = (tmp_path / "audit").read_text()
    assert text.count("unpickle\t") >= 1 and text.startswith("start\t")


def test_the_audit_sees_and_refuses_connections_to_other_machines(tmp_path: Path) -> None:
    """Checks that tests/system/test_mutations.py can fail. 192.0.2.1 is an address for documentation."""
    audit = {"TRILLORA_AUDIT": str(tmp_path / "audit"), "TRILLORA_AUDIT_OFFLINE": "1", "PYTHONPATH": str(STARTUP)}
    code = (
        "import socket\n"
        "for address in [('127.0.0.1', 9), ('localhost', 9), ('192.0.2.1', 9), ('example.org', 80)]:\n"
        "    try: socket.create_connection(address, timeout=5)\n"
        "    except OSError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **audit}, check=True, capture_output=True)
    found = [line for line in (tmp_path / "audit").read_text().splitlines() if line.startswith("connect\t")]
    assert done.stdout.count(b"no network in this test") == 2
    assert len(found) == 2 and "192.0.2.1" in found[0] and "example.org" in found[1]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt"])
def test_pickled_weights_are_refused_and_not_opened(folder: Path, tmp_path: Path, name: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in (folder / "model").iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    # Loading it as a pickle creates a file.
    (model / name).write_bytes(f"cos\nsystem\n(S'touch {tmp_path}/owned'\ntR.".encode())
    settings = tiny_run.recipe(folder)
    settings["model"]["name"] = str(model)
    with pytest.raises(TrilloraError) as caught:
        train(load_recipe(settings), tmp_path / "run")
    assert name in str(caught.value) or "safetensors" in str(caught.value)
    assert not (tmp_path / "owned").exists()


@full_dose_only
def test_no_secret_is_printed_or_written(watched: Watched, record_property: Record) -> None:
    """No secret is in what was printed, in the run's folder, its checkpoints, its report, or the cache."""
    secrets = [secret.encode() for secret in (*SECRETS.values(), IN_ADDRESS)]
    files = [path for path in watched.place.rglob("*") if path.is_file() and path.name != "audit"]
    assert any(path.name == "report.html" for path in files) and any(path.name == "state.json" for path in files)
    resolved = (watched.place / "inner" / "addressed" / "resolved.yaml").read_text("utf-8")
    assert "@bucket/run" in resolved, "the address itself is shown"
    places = [(str(path), path.read_bytes()) for path in files]
    places += [(f"output {number}", text.encode()) for number, text in enumerate(watched.outputs)]
    found = [(where, secret) for where, content in places for secret in secrets if secret in content]
    assert not found
    record_property("files and outputs searched", len(places))
    record_property("secrets found", len(found))


@pytest.mark.parametrize(
    "change",
    [
        {"data": {"path": f"https://me:{IN_ADDRESS}@127.0.0.1:9/rows.jsonl"}},
        {"data": {"path": f"https://127.0.0.1:9/rows.jsonl?token={IN_ADDRESS}"}},
        {"train": {"checkpoint_dir": f"ftp://me:{IN_ADDRESS}@127.0.0.1:9/run"}},
        {"train": {"checkpoint_dir": f"s3://key:{IN_ADDRESS}@bucket/run"}},
        {"train": {"chekpoint_to": f"s3://key:{IN_ADDRESS}@bucket/run"}},
        {"train": {"steps": f"s3://key:{IN_ADDRESS}@bucket/run"}},
    ],
    ids=lambda change: "-".join([*change, *next(iter(change.values()))]),
)
def test_no_error_repeats_the_secret_of_an_address(folder: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    """Also for addresses that cannot be opened and for invalid recipes."""
    events: list[Any] = []
    with pytest.raises(TrilloraError) as caught:
        train(load_recipe(tiny_run.recipe(folder, **change)), tmp_path / "run", listener=events.append)
    assert IN_ADDRESS not in f"{caught.value} {events}"
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or IN_ADDRESS.encode() not in path.read_bytes()


@full_dose_only
def test_strange_names_do_not_leave_the_folder(watched: Watched, record_property: Record) -> None:
    """Only the run, the cache and Python's own files were written."""
    programs = os.environ["JAX_COMPILATION_CACHE_DIR"]  # of these tests
    allowed = [str(watched.place / "inner"), str(watched.place / "cache"), programs, "/dev/", "/proc/"]
    changed = {line[1] for line in watched.audit if line[0] == "change" and os.path.isabs(line[1])}
    temporary = Path(tempfile.gettempdir())
    outside = {path for path in changed if not path.startswith(tuple(allowed)) and "__pycache__" not in path}
    outside = {path for path in outside if temporary not in (Path(path), Path(path).parent)}
    assert len(changed) > 20 and not outside, sorted(outside)[:10]
    assert not list(watched.place.rglob("owned")) and not list(watched.place.rglob("up"))
    page = (watched.run / "report.html").read_text("utf-8")
    assert "<i>'" not in page and "<b>&amp; .." not in page
    record_property("files changed", len(changed))


def test_no_stage_is_named_like_a_path(record_property: Record) -> None:
    generator = random.Random(8)
    letters = "ab.Z0-_/\\ :\n\0~$%<>'\"|*?é\u202e"
    num_names = num_refused = 0
    for _ in range(dose(100, 10_000)):
        name = "".join(generator.choice(letters) for _ in range(generator.randrange(0, 12)))
        stage = {"name": name, "data": "rows.jsonl", "steps": 1}
        num_names += 1
        try:
            load_recipe({"model": "smollm2", "stages": [stage]})
        except TrilloraError:
            num_refused += 1
            continue
        assert os.path.basename(name) == name and name.strip(".") and name.isprintable() and name.isascii()
    assert num_refused > num_names // 2
    record_property("stage names", num_names)
