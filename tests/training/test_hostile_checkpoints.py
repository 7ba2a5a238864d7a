"""Checkpoints that were changed: by a disk, which the checksums notice, or by a program that writes new checksums.

The second kind is refused with its file and reason, and the checkpoint before it is used. What is accepted is exactly
what the files say.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import jax
import numpy as np
import pytest
import tiny_run
from dose import dose
from fsspec.implementations.memory import MemoryFileSystem
from hostile_json import changed_bytes, changed_value
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load, save

from trillora.engine.step import GradNormStats, TrainState
from trillora.errors import TrilloraError
from trillora.events import Alarm, Event, Step, to_metrics_line
from trillora.files.bounded import read_whole
from trillora.files.checkpoints import Checkpoints
from trillora.files.storage import MARK, open_storage
from trillora.model.layout import Leaf
from trillora.recipe.load import load_recipe
from trillora.runs.files import METRICS_FILE
from trillora.step.build import Assembly
from trillora.training.divergence import DivergenceMonitor
from trillora.training.state.files import (
    FACTS_FILE,
    FILES,
    STATE_FILE,
    find_fault,
    from_files,
    read_facts,
    read_kept,
)
from trillora.training.state.position import MemberPosition, Position
from trillora.training.trainer import train

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
SHAPES = {"q.lora_a": (2, 6), "q.lora_b": (4, 2)}
URL = "memory://hostile/run"

# A checkpoint without a model: the state of one linear layer.


class FakeAssembly(Assembly):
    """Of one adapter, without a model."""

    def __init__(self, shapes: TrainState, layout: Any) -> None:
        self.__dict__.update(state_shapes=shapes, model=SimpleNamespace(adapter_layout=layout))


def fake_assembly() -> Assembly:
    sharding = SingleDeviceSharding(jax.devices()[0])

    def struct(shape: tuple[int, ...], dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    adapter = {name: struct(shape) for name, shape in SHAPES.items()}
    shapes = TrainState(
        step=struct((), np.int32),
        adapter=adapter,
        optimizer={"mu": adapter, "nu": adapter},
        key=struct((), jax.eval_shape(lambda: jax.random.key(0)).dtype),
        typical=GradNormStats(struct(()), struct((), np.int32)),
    )
    layout = {name: Leaf((name,), False, shape, np.dtype(np.float32)) for name, shape in SHAPES.items()}
    return FakeAssembly(shapes, layout)


def files_of(step: int) -> dict[str, bytes]:
    draw = np.random.default_rng(step)
    arrays = {name: draw.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    state: dict[str, np.ndarray] = {
        f"train/{part}/{name}": arrays[name] for part in ("adapter", "optimizer/mu", "optimizer/nu") for name in SHAPES
    }
    state |= {"train/step": np.int32(step), "train/key": np.array([0, 7], np.uint32)}
    state |= {"train/typical/log_norm": np.float32(0.5), "train/typical/num_steps": np.int32(step)}
    health = DivergenceMonitor(math.log(400))
    for number in range(step):
        health.observe(number + 1, 5.0 - number, 1.0, False)
    member = MemberPosition("train", health, step, measured_at=step, best_loss=4.0, best_step=step)
    position = Position([member], [0], step=step, global_step=step)
    settings = {"backend": "cpu", "num_devices": 1, "mesh": {"data": 1, "fsdp": 1, "tensor": 1}, "dtype": "float32"}
    settings |= {"layers": "scan", "attention": "xla", "loss_chunk": 512, "remat": "none", "micro_batch_size": 4}
    settings |= {"quantize": "none", "matmul": "full", "kernels": "xla", "adapters_at_once": 1, "document_room": None}
    stage = {"name": "train", "settings": settings, "template_date": None, "reasons": {"remat": "fastest"}}
    facts = {
        "run": "5f0c",
        "identity": {"model": "0" * 64},
        "options": {"lora.rank": 2, "lora.alpha": 4.0, "lora.dropout": 0.0, "lora.rslora": False},
        "resolved": {"stages": [stage], "evaluate_every": 2},
        "devices": "1 x cpu (cpu)",
        "libraries": {"jax": "0.10"},
        "position": position.to_dict(),
    }
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4.0, "lora_dropout": 0.0, "use_rslora": False}
    lines = [Step(n + 1, 9, "train", 5.0 - n, 1e-3, 1.0, False, 9.0, 1.0, 1.0, 0.0) for n in range(step)]
    peft = {f"base_model.model.{name[:-2]}_{name[-1].upper()}.weight": array for name, array in arrays.items()}
    return {
        WEIGHTS: save({name.replace("lora_", "lora_"): array for name, array in peft.items()}),
        CONFIG: json.dumps(config).encode(),
        STATE_FILE: save({name: np.asarray(array) for name, array in state.items()}),
        FACTS_FILE: json.dumps(facts).encode(),
        METRICS_FILE: "".join(f"{to_metrics_line(line)}\n" for line in lines).encode(),
    }


@pytest.fixture
def checkpoints() -> Iterator[Checkpoints]:
    """Steps 1 and 2, in memory."""
    system: MemoryFileSystem = fsspec.filesystem("memory")
    made = Checkpoints(open_storage(URL))
    for step in (1, 2):
        made.write(step, files_of(step))
    yield made
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def stored_path(file: str) -> str:
    return f"/hostile/run/step-00000002/{file}"


def test_what_a_run_writes_is_accepted(checkpoints: Checkpoints) -> None:
    events: list[Event] = []
    found = checkpoints.newest_valid(events.append, find_fault)
    assert found == (2, files_of(2)) and not events
    check_exact(files_of(2), fake_assembly())


def check_exact(files: dict[str, bytes], assembly: Any) -> bool:
    """Reads an accepted checkpoint as a resumed run does. False if it does not fit the run; else the state is exactly
    what the files say."""
    facts, written = read_facts(files), json.loads(files[FACTS_FILE])
    assert facts.model_dump(mode="json") == written
    position = facts.position
    assert position.to_dict() == written["position"]
    assert 0 <= position.step <= position.global_step == 2
    try:
        state, kept = from_files(files, assembly, position, "here"), read_kept(files, assembly, position, "here")
    except TrilloraError:
        return False
    stored, adapter = load(files[STATE_FILE]), load(files[WEIGHTS])
    [member] = position.members
    if not member.is_running:
        assert not stored and member.name in kept
        return True
    assert len(adapter) == len(SHAPES) and len(stored) == 3 * len(SHAPES) + 4
    for name in SHAPES:
        peft = f"base_model.model.{name[:-2]}_{name[-1].upper()}.weight"
        assert (member.best_step is None) == (not kept)
        assert not kept or np.array_equal(kept[member.name][name], adapter[peft])
        assert np.array_equal(state.adapter[name], stored[f"{member.name}/adapter/{name}"])
        for part in ("mu", "nu"):
            assert np.array_equal(state.optimizer[part][name], stored[f"{member.name}/optimizer/{part}/{name}"])
            assert np.isfinite(state.optimizer[part][name]).all()
    assert int(state.step) == int(stored[f"{member.name}/step"])
    return True


# Damage (a)


def test_damage_is_detected(checkpoints: Checkpoints) -> None:
    draw, system, kinds = random.Random(12), fsspec.filesystem("memory"), Counter[str]()
    for _ in range(dose(100, 2000)):
        file = draw.choice([*FILES, "checksums.json"])
        path = stored_path(file)
        before = system.cat_file(path)
        if draw.random() < 0.1:
            system.rm_file(path)
            kinds["deleted"] += 1
        else:
            after = changed_bytes(before, draw)
            if after == before:
                continue
            system.pipe_file(path, after)
            kinds["changed"] += 1
        events: list[Event] = []
        found = checkpoints.newest_valid(events.append, find_fault)
        assert found is not None and found[0] == 1 and len(events) == 1
        assert isinstance(events[0], Alarm) and file in events[0].text
        system.pipe_file(path, before)
    assert min(kinds[kind] for kind in ("deleted", "changed")) >= 3
    found = checkpoints.newest_valid(lambda event: None, find_fault)
    assert found is not None and found[0] == 2


# New checksums around other content (b)


def other_json(file: str) -> Callable[[dict[str, bytes], random.Random], bytes]:
    def change(files: dict[str, bytes], draw: random.Random) -> bytes:
        if draw.random() < 0.2:
            return changed_bytes(files[file], draw)
        return json.dumps(changed_value(json.loads(files[file]), draw)).encode()

    return change


def other_metrics(files: dict[str, bytes], draw: random.Random) -> bytes:
    lines = files[METRICS_FILE].splitlines()
    at = draw.randrange(len(lines))
    lines[at] = json.dumps(changed_value(json.loads(lines[at]), draw)).encode()
    return b"\n".join(lines) if draw.random() < 0.8 else changed_bytes(files[METRICS_FILE], draw)


def other_tensors(file: str) -> Callable[[dict[str, bytes], random.Random], bytes]:
    def change(files: dict[str, bytes], draw: random.Random) -> bytes:
        arrays = load(files[file])
        name = draw.choice(sorted(arrays))
        array = arrays[name]
        match draw.randrange(8):
            case 0:
                return changed_bytes(files[file], draw)
            case 1:
                del arrays[name]
            case 2:
                arrays[draw.choice(["extra", name + "x", "../x", ""])] = array
            case 3:
                arrays[name] = array.reshape(draw.choice([(-1,), (1, *array.shape), array.shape[::-1]]))
            case 4:
                dtype = draw.choice(["float16", "float64", "int8", "int64", "uint32", "bool"])
                with np.errstate(invalid="ignore"):  # a negative number as uint32
                    arrays[name] = array.astype(dtype)
            case 5:
                arrays[name] = np.full(array.shape, draw.choice([np.nan, np.inf, -np.inf]), np.float32)
            case 6:
                arrays[name] = np.zeros(draw.choice([(0,), (1,), (3, 3), (2, 2, 2)]), array.dtype)
            case _:
                arrays[name], arrays["other"] = arrays[draw.choice(sorted(arrays))], array
        return save({key: np.ascontiguousarray(value) for key, value in arrays.items()})

    return change


CHANGES: dict[str, Callable[[dict[str, bytes], random.Random], bytes]] = {
    FACTS_FILE: other_json(FACTS_FILE),
    CONFIG: other_json(CONFIG),
    METRICS_FILE: other_metrics,
    STATE_FILE: other_tensors(STATE_FILE),
    WEIGHTS: other_tensors(WEIGHTS),
}


def test_other_content_with_new_checksums_is_refused_or_exactly_used(checkpoints: Checkpoints) -> None:
    draw, assembly, good = random.Random(13), fake_assembly(), files_of(2)
    outcomes = Counter[tuple[str, str]]()
    for _ in range(dose(150, 2000)):
        file = draw.choice(sorted(CHANGES))
        files = {**good, file: CHANGES[file](good, draw)}
        if draw.random() < 0.03:
            del files[file]
        checkpoints.write(2, files)
        events: list[Event] = []
        found = checkpoints.newest_valid(events.append, find_fault)
        assert found is not None
        if found[0] == 1:
            assert len(events) == 1 and isinstance(events[0], Alarm) and file in events[0].text, events
            outcomes[file, "previous"] += 1
        else:
            assert found == (2, files) and not events
            outcomes[file, "used" if check_exact(files, assembly) else "does not fit"] += 1
    assert sum(outcomes[file, "previous"] for file in CHANGES) > sum(outcomes.values()) / 2
    assert all(outcomes[file, "previous"] for file in CHANGES)
    assert outcomes[STATE_FILE, "does not fit"]


@pytest.mark.parametrize("file", [WEIGHTS, CONFIG, STATE_FILE, METRICS_FILE, MARK, "other"])
def test_a_file_of_terabytes_is_damage_and_is_not_read(tmp_path: Path, file: str) -> None:
    made, events = Checkpoints(open_storage(tmp_path)), list[Event]()
    for step in (1, 2):
        made.write(step, files_of(step))
    with open(tmp_path / "step-00000002" / file, "ab") as target:
        target.truncate(4 << 40)  # a sparse file: it takes no space
    found = made.newest_valid(events.append, find_fault)
    assert found is not None and found[0] == 1
    [alarm] = events
    assert isinstance(alarm, Alarm) and file in alarm.text


def test_a_file_that_does_not_fit_into_memory_is_named(tmp_path: Path) -> None:
    """Its checksums may be right: the digest of zeros is known."""
    with open(tmp_path / "state.safetensors", "wb") as target:
        target.truncate(4 << 40)
    with pytest.raises(TrilloraError, match=r"4398\.0 GB") as refused:
        read_whole(tmp_path / "state.safetensors")
    assert refused.value.where == str(tmp_path / "state.safetensors")


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        (FACTS_FILE, b"[]", "not as expected"),
        (FACTS_FILE, b"{", "not valid JSON"),
        (CONFIG, b"{}", "peft_type"),
        (STATE_FILE, b"none", "not a valid safetensors file"),
        (WEIGHTS, b"", "cannot be read"),
        (METRICS_FILE, b"{}\n", "Line 1 is not a metric"),
        (METRICS_FILE, None, "It is missing"),
    ],
)
def test_the_alarm_names_the_file_and_the_reason(
    checkpoints: Checkpoints, file: str, content: bytes | None, reason: str
) -> None:
    """Each of these could be a traceback."""
    files = files_of(2)
    if content is None:
        del files[file]
    else:
        files[file] = content
    checkpoints.write(2, files)
    events: list[Event] = []
    found = checkpoints.newest_valid(events.append, find_fault)
    assert found is not None and found[0] == 1
    (alarm,) = events
    assert isinstance(alarm, Alarm) and file in alarm.text and reason in alarm.text


# Complete runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("tiny"), tiny_run.llama(num_layers=1))


@pytest.fixture(scope="module")
def settings(folder: Path, shared_steps: None) -> dict[str, Any]:
    return tiny_run.recipe(folder, train={"steps": 3, "checkpoint_every": 1, "keep_checkpoints": 3})


@pytest.fixture(scope="module")
def whole(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    train(load_recipe(settings), run)
    return run


def stopped_run(whole: Path, run: Path) -> Path:
    """As if it had been killed while it wrote its adapter."""
    shutil.copytree(whole, run)
    (run / "adapter").rename(run / ".making-adapter-12345")
    return run


def refusal(settings: dict[str, Any], run: Path) -> str:
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(TrilloraError) as caught:
        train(load_recipe(settings), run)
    assert (run / "metrics.jsonl").read_bytes() == before  # nothing was lost
    return str(caught.value)


def test_a_run_without_its_checkpoints_does_not_start_over(
    settings: dict[str, Any], whole: Path, tmp_path: Path
) -> None:
    run = stopped_run(whole, tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    (run / "checkpoints").rename(elsewhere)
    message = refusal(settings, run)
    assert "step 3 was saved" in message and str(whole / "checkpoints" / "step-00000003") in message
    assert not (run / "checkpoints").exists()
    other = {**settings, "train": {**settings["train"], "checkpoint_dir": str(tmp_path / "other")}}
    Checkpoints(open_storage(tmp_path / "other")).write(1, files_of(1))
    assert "belong to another run" in refusal(other, run)
    assert "checkpoint_dir cannot be written" in refusal(
        {**settings, "train": {**settings["train"], "checkpoint_dir": str(run / "run.json")}}, run
    )
    (run / "checkpoints").mkdir()
    for step in elsewhere.glob("step-*"):  # links are as good as folders
        (run / "checkpoints" / step.name).symlink_to(step)
    train(load_recipe(settings), run)
    tiny_run.assert_same(run, whole)
    assert not list(run.glob(".making-*"))
    assert json.loads((run / "saved.json").read_text())["where"] == str(run / "checkpoints" / "step-00000003")


def test_a_run_resumes_from_the_checkpoint_before_one_that_is_not_ours(
    settings: dict[str, Any], whole: Path, tmp_path: Path
) -> None:
    run = stopped_run(whole, tmp_path / "run")
    checkpoints = tiny_run.checkpoints_of(run)
    facts = json.loads(checkpoints.read(3)[FACTS_FILE])
    checkpoints.write(3, {**checkpoints.read(3), FACTS_FILE: json.dumps({**facts, "position": []}).encode()})
    events: list[Event] = []
    train(load_recipe(settings), run, listener=events.append)
    alarms = [event.text for event in events if isinstance(event, Alarm)]
    assert len(alarms) == 1 and "state.json" in alarms[0] and "position" in alarms[0]
    tiny_run.assert_same(run, whole)
