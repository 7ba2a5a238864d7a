"""The recipe: what it accepts, what it says when it does not, and that what is written reads back the same."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from trillora.errors import TrilloraError
from trillora.recipe import yaml
from trillora.recipe.load import load_recipe, options, recipe_schema
from trillora.recipe.resolve import ResolvedRecipe, ResolvedStage, StepSettings, given_settings
from trillora.recipe.schema import MeshSection, Recipe, TrainSection, seconds_of, stages_of

ROOT = Path(__file__).parents[2]
SMALLEST = {"model": "smollm2", "data": "train.jsonl"}


def recipe_file(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(source: Any, *overrides: str) -> TrilloraError:
    with pytest.raises(TrilloraError) as caught:
        load_recipe(source, overrides)
    assert caught.value.what and caught.value.do
    return caught.value


def test_smallest_recipe_has_every_default(tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file(tmp_path, "model: smollm2\ndata: train.jsonl\n"))
    assert recipe.model.name == "smollm2"
    assert recipe.data.path == str(tmp_path / "train.jsonl")
    assert (recipe.lora.rank, recipe.lora.alpha, recipe.lora.targets) == (16, 32.0, "all-linear")
    assert (recipe.train.steps, recipe.train.epochs, recipe.train.batch_size) == (None, 1.0, 8)
    assert recipe.engine.attention == recipe.hardware.mesh == "auto"


def test_the_recipe_of_the_design_loads(tmp_path: Path) -> None:
    text = """
model: smollm2                 # the embedded one
data: train.jsonl
lora: {rank: 16, alpha: 32, dropout: 0.0, targets: all-linear}
train: {sequence_length: 512, batch_size: 8, optimizer: adamw, learning_rate: 2.0e-4, steps: 60, seed: 0}
"""
    recipe = load_recipe(recipe_file(tmp_path, text))
    assert (recipe.train.steps, recipe.train.epochs, recipe.train.learning_rate) == (60, None, 2e-4)


def test_every_option_has_a_line_of_effect_and_a_way_to_be_named() -> None:
    known = options()
    assert len(known) == 222
    for option in known.values():
        assert option.effect.endswith("."), option.path
        assert option.expected, option.path


def test_only_values_are_suggested_and_not_words_of_their_description() -> None:
    for override in ("train.batch_size=two", "train.epochs=numbers", "model.name=3", "train.learning_rate=above"):
        assert "did you mean" not in refusal(SMALLEST, override).do, override


def test_a_loaded_recipe_does_not_change() -> None:
    recipe = load_recipe(SMALLEST)
    with pytest.raises(ValidationError):
        recipe.train.steps = 3


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("train.batch_sise", "train.batch_size"),
        ("trian", "train"),
        ("rank", "lora.rank"),
        ("train.lr", "train.learning_rate"),
        ("train.rank", "lora.rank"),
        ("learning_rat", "train.learning_rate"),
        ("hardware.mesh.fdsp", "hardware.mesh.fsdp"),
        ("lora.target_modules", "lora.targets"),
        ("lora.adapter", "lora.from"),
        ("train_steps", "train.steps"),
        ("model_name", "model.name"),
    ],
)
def test_unknown_key_names_the_nearest_and_the_place(tmp_path: Path, path: str, meant: str) -> None:
    lines = "model: a\ndata: b.jsonl\n"
    for depth, key in enumerate(path.split(".")):
        lines += "  " * depth + key + (":\n" if depth < path.count(".") else ": 8\n")
    file = recipe_file(tmp_path, lines)
    error = refusal(file)
    assert error.what == f"Unknown option '{path}'."
    assert error.where == f"{file}, {path}"
    assert f"did you mean '{meant}'?" in error.do

    error = refusal(SMALLEST, f"{path}=8")
    assert error.where == f"override {path}"
    assert f"did you mean '{meant}'?" in error.do


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("lora.rank=0", "a whole number of at least 1"),
        ("lora.rank=1.5", "a whole number of at least 1"),
        ("lora.rank=yes", "a whole number of at least 1"),
        ("lora.dropout=1", "at most 0.99"),
        ("lora.dropout=-0.1", "at least 0"),
        ("lora.alpha=0", "above 0"),
        ("lora.targets=q_proj", "all-linear or a list"),
        ("lora.targets=[]", "all-linear or a list"),
        ("train.learning_rate=0", "above 0"),
        ("train.learning_rate=.inf", "above 0"),
        ("train.learning_rate=.nan", "above 0"),
        ("train.learning_rate=fast", "a number"),
        ("train.micro_batch_size=some", "auto or a whole number"),
        ("train.optimizer=adam", "did you mean 'adamw'?"),
        ("train.seed=-1", "at least 0"),
        ("engine.attention=spalsh", "did you mean 'splash'?"),
        ("engine.remat=", "auto or one of none, linear, wide, half, gate, attention, full, dots, offload"),
        ("hardware.devices=0", "auto or a whole number"),
        ("hardware.mesh=8", "auto or a mapping of data, fsdp, tensor"),
        ("data.pack=3", "yes or no"),
        ("model=no", "quotes"),
        ("model.dtype=fp16", "float16 does not exist here"),
        ("model.dtype=bf16", "did you mean 'bfloat16'?"),
        ("model.name=''", "text"),
        ("model.revision=12", "quotes"),
        ("lora=3", "a mapping of rank"),
        ("lora.rank.x=3", "a whole number"),
        ("train.micro_batch_size=3", "use auto, or one of 1, 2, 4, 8"),
    ],
)
def test_a_wrong_value_is_reported_with_what_was_expected(override: str, expected: str) -> None:
    error = refusal(SMALLEST, override)
    assert override.partition("=")[0].removesuffix(".x") in error.what
    assert error.where == f"override {override.partition('=')[0]}"  # the value may be a secret
    assert expected in error.do


def test_all_problems_are_reported_at_once() -> None:
    error = refusal(
        {"data": "x.jsonl", "rank": 3, "train": {"batch_sise": 2, "steps": 0}, "lora": {"targets": [1, "a"]}}
    )
    text = str(error)
    wanted = [
        "'rank'",
        "'train.batch_sise'",
        "train.steps cannot be 0",
        "lora.targets[0] cannot be 1",
        "has no 'model'",
    ]
    assert [word for word in wanted if word not in text] == []
    assert text.count("also:") == len(wanted) - 1


@pytest.mark.parametrize(
    ("text", "line", "advice"),
    [
        ("model: a\ntrain:\n\tsteps: 3\n", 3, "spaces"),
        ("model: a\nmodel: b\n", 2, "remove one"),
        ("train: {steps: 1, steps: 2}\n", 1, "remove one"),
        ("model: a\ndata: [1, 2\n", 3, "brackets"),
        ("model: a: b\n", 1, "colon"),
        ("model: !!python/object/apply:os.system [id]\n", 1, "tags"),
        ("model: a\n---\nmodel: b\n", 2, "check"),
        ("model: \x07\n", 1, "UTF-8"),
    ],
)
def test_bad_yaml_is_reported_with_file_and_line(tmp_path: Path, text: str, line: int, advice: str) -> None:
    file = recipe_file(tmp_path, text)
    error = refusal(file)
    assert error.where == f"{file}:{line}"
    assert advice in error.do


@pytest.mark.parametrize(
    ("text", "found"), [("", "empty"), ("# nothing\n", "empty"), ("- a\n", "a list"), ("hello\n", "a single value")]
)
def test_what_is_not_a_mapping_is_no_recipe(tmp_path: Path, text: str, found: str) -> None:
    assert found in refusal(recipe_file(tmp_path, text)).what


def test_unreadable_files_are_reported(tmp_path: Path) -> None:
    recipe_file(tmp_path, "", name="other.yaml")
    assert "other.yaml" in refusal(tmp_path / "missing.yaml").do
    assert "cannot be read" in refusal(tmp_path).what
    (tmp_path / "latin.yaml").write_bytes(b"model: \xe9\n")
    assert "UTF-8" in refusal(tmp_path / "latin.yaml").do


@pytest.mark.parametrize("text", ["[" * 5000, "model: " + "9" * 5000, "a: &a [*a]", "? {b: c}\n: d", "1: 2\nyes: 3\n"])
def test_hostile_text_never_ends_in_a_traceback(tmp_path: Path, text: str) -> None:
    refusal(recipe_file(tmp_path, text))


def test_a_bomb_of_aliases_is_refused_with_a_short_message(tmp_path: Path) -> None:
    text = "l0: &l0 [x, x, x, x, x, x, x, x, x]\n"
    text += "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 12))
    error = refusal(recipe_file(tmp_path, text + "model: *l11\nlora: {rank: *l11}\n"))
    assert len(str(error)) < 10_000


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-4", 2e-4),
        ("2.0e-4", 2e-4),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("010", 10),
        ("1_000", 1000),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("yes", True),
        ("off", False),
        ("none", "none"),
        ("null", None),
        ("", None),
        ("e5", "e5"),
        ("1e", "1e"),
        ("0x10", "0x10"),
        ("-3", -3),
    ],
)
def test_plain_words_mean_what_a_person_means(text: str, value: Any) -> None:
    parsed = yaml.parse(text, "here")
    assert parsed == value
    assert type(parsed) is type(value)


def test_numbers_may_be_spelled_in_any_usual_way() -> None:
    recipe = load_recipe(SMALLEST, ["train.learning_rate=2e-4", "train.batch_size=1e1", "lora.alpha='32'"])
    assert (recipe.train.learning_rate, recipe.train.batch_size, recipe.lora.alpha) == (2e-4, 10, 32.0)


def test_overrides_reach_inside_shorthand_and_keep_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = tmp_path / "recipes", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    file = recipe_file(folder, "model: smollm2\ndata: {path: a.jsonl, train_on: everything}\nlora:\n")
    recipe = load_recipe(file, ["model.dtype=float32", "lora.targets=[q_proj, v_proj]"])
    assert (recipe.model.name, recipe.model.dtype) == ("smollm2", "float32")
    assert recipe.lora.targets == ("q_proj", "v_proj")
    assert recipe.data.path == str(folder / "a.jsonl")
    # A path in an override is relative to the current folder; the other options of the recipe stay.
    recipe = load_recipe(file, ["data=b.jsonl"])
    assert (recipe.data.path, recipe.data.train_on) == (str(elsewhere / "b.jsonl"), "everything")


def test_overrides_as_mappings_equal_overrides_as_text() -> None:
    text = load_recipe(SMALLEST, ["train.steps=5", "lora.rank=4", "hardware.mesh={fsdp: 2}"])
    assert load_recipe(SMALLEST, {"train": {"steps": 5}, "lora.rank": 4, "hardware.mesh": {"fsdp": 2}}) == text


def test_an_override_without_a_value_is_refused() -> None:
    assert "key=value" in refusal(SMALLEST, "train.steps").do


def test_steps_and_epochs_exclude_each_other_and_the_later_wins() -> None:
    assert "Both" in refusal({**SMALLEST, "train": {"steps": 5, "epochs": 2}}).what
    recipe = load_recipe({**SMALLEST, "train": {"epochs": 3}}, ["train.steps=5"])
    assert (recipe.train.steps, recipe.train.epochs) == (5, None)
    recipe = load_recipe({**SMALLEST, "train": {"steps": 5}}, ["train.epochs=0.5"])
    assert (recipe.train.steps, recipe.train.epochs) == (None, 0.5)


def test_values_that_do_not_fit_together_are_refused() -> None:
    assert "warmup" in refusal(SMALLEST, "train.steps=5", "train.warmup_steps=6").what
    assert "8 devices" in refusal(SMALLEST, "hardware.mesh={data: 2, fsdp: 4}", "hardware.devices=4").what


@pytest.mark.parametrize("path", ["org/set", "https://host/x.jsonl", "gs://bucket/x.jsonl", "hf://datasets/a/b"])
def test_hub_ids_and_addresses_of_data_stay(path: str) -> None:
    assert load_recipe({"model": "m", "data": path}).data.path == path


def test_paths_become_absolute_from_the_recipes_folder(tmp_path: Path) -> None:
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "mine").write_text("")
    file = recipe_file(tmp_path, "model: ./folder\ndata: sets/mine\n")
    recipe = load_recipe(file)
    assert recipe.data.path == str(tmp_path / "sets" / "mine")  # exists, so it is no hub id
    assert recipe.model.name == str(tmp_path / "folder")
    assert load_recipe(file, ["model=org/name"]).model.name == "org/name"
    assert load_recipe({"model": "m", "data": "sub/train.jsonl"}).data.path == str(Path.cwd() / "sub" / "train.jsonl")


SETTINGS = StepSettings(
    backend="tpu",
    num_devices=8,
    mesh=MeshSection(fsdp=8),
    dtype="bfloat16",
    layers="scan",
    attention="splash",
    loss_chunk=4096,
    remat="full",
    micro_batch_size=4,
)
REASONS = {
    "dtype": "the fastest format",
    "mesh": "the base is split",
    "micro_batch_size": "fits: 3.1 of 15.7 GiB # with a hash: and\na line break",
    "every_steps": "ten evaluations in 120 steps",
}


def test_resolved_recipe_reads_back_the_same_with_its_reasons(tmp_path: Path) -> None:
    recipe = load_recipe(SMALLEST, ["train.steps=120"])
    resolved = ResolvedRecipe((ResolvedStage("train", SETTINGS, None, REASONS),), evaluate_every=12)
    filled = resolved.fill(recipe)
    not_options = {"adapters_at_once": 1, "document_room": None}
    assert {**given_settings(stages_of(filled)[0].recipe), **not_options} == vars(SETTINGS)
    text = resolved.dump(recipe)
    assert text == resolved.dump(filled)
    assert load_recipe(recipe_file(tmp_path, text)) == filled
    assert "  dtype: bfloat16  # the fastest format\n" in text
    assert "  mesh: {data: 1, fsdp: 8, tensor: 1}  # the base is split\n" in text
    assert "  micro_batch_size: 4  # fits: 3.1 of 15.7 GiB # with a hash: and a line break\n" in text
    assert "  every_steps: 12  # ten evaluations in 120 steps\n" in text
    assert TypeAdapter(ResolvedRecipe).validate_python(json.loads(json.dumps(resolved.to_dict()))) == resolved


def test_what_the_user_fixed_is_found_and_nothing_else() -> None:
    (stage,) = stages_of(load_recipe(SMALLEST, ["train.micro_batch_size=2", "engine.remat=none"]))
    options = {"micro_batch_size": 2, "remat": "none", "quantize": "none", "matmul": "full"}
    assert given_settings(stage.recipe) == options
    fields = {field.name for field in dataclasses.fields(StepSettings)}
    assert fields - set(StepSettings.OPTIONS) == {"document_room"}  # the data gives it


def test_any_text_survives_being_written_and_read() -> None:
    awkward = ["1e5", "2024-01-01", "yes", "null", "~", "{x}", "'\"", "é☃😀", "0x10", "1:30", "*a", "!t", "<<", "1_0"]
    awkward += ["010", "%", "@", "-", "="]
    awkward += ["", " a ", "a: b", "# c", "a\nb", "\t", "\x85", "\u2028", "a" * 500, "a b " * 99]
    letters = "".join(awkward)
    draw = random.Random(0)
    awkward += ["".join(draw.choices(letters, k=draw.randint(1, 12))) for _ in range(2000)]
    for text in awkward:
        assert yaml.parse(yaml.write(text), "here") == text
        assert yaml.parse(f"k: {yaml.write([text, 1])}  # why", "here") == {"k": [text, 1]}
        assert "\n" not in yaml.write([text])
    for number in [draw.uniform(-1, 1) * 10.0 ** draw.randint(-300, 300) for _ in range(500)]:
        assert yaml.parse(yaml.write(number), "here") == number


def test_committed_schema_is_in_sync() -> None:
    committed = json.loads((ROOT / "docs" / "recipe.schema.json").read_text(encoding="utf-8"))
    assert committed == recipe_schema(), "run: trillora schema > docs/recipe.schema.json"


def test_schema_has_no_option_the_recipe_lacks_and_none_too_few() -> None:
    schema = recipe_schema()
    assert set(schema["properties"]) == set(Recipe.model_fields)
    described = 0
    for definition in schema["$defs"].values():
        assert definition["additionalProperties"] is False
        for node in definition["properties"].values():
            assert node["description"]
            described += 1
    # The data of a stage or phase has the options of data, described once.
    repeated = sum(path.startswith(("stages.data.", "phases.data.")) for path in options())
    assert described + len(schema["properties"]) == len(options()) - repeated


def test_nothing_of_the_environment_enters_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary")
    recipe = load_recipe({"model": "$HF_TOKEN", "data": "${HF_TOKEN}.jsonl"})
    resolved = ResolvedRecipe((ResolvedStage("train", SETTINGS, None, {}),), evaluate_every=1)
    assert "canary" not in resolved.dump(recipe)


STAGED = {
    "model": "smollm2",
    "train": {"learning_rate": 1e-3, "schedule": "wsd", "sequence_length": 128},
    "stages": [
        {"name": "text", "data": "text.txt", "steps": 10},
        {"name": "chat", "data": {"path": "chat.jsonl", "pack": False}, "epochs": 2, "learning_rate": 2e-4,
         "schedule": "cosine", "optimizer_state": "restart"},
    ],
}  # fmt: skip


def test_stages_are_recipes_of_their_own() -> None:
    text, chat = stages_of(load_recipe(STAGED))
    assert (text.name, text.restarts_optimizer, chat.name, chat.restarts_optimizer) == ("text", False, "chat", True)
    assert (text.recipe.train.steps, text.recipe.train.epochs, text.recipe.train.schedule) == (10, None, "wsd")
    assert text.recipe.train.decay_fraction == 0.2 and text.recipe.data.path == os.path.abspath("text.txt")
    train = chat.recipe.train
    assert (train.steps, train.epochs, train.learning_rate, train.schedule) == (None, 2, 2e-4, "cosine")
    assert (train.decay_fraction, train.sequence_length, chat.recipe.data.pack) == (None, 128, False)
    (only,) = stages_of(load_recipe(SMALLEST))
    assert only.recipe.model_dump() == {**load_recipe(SMALLEST).model_dump(), "run_has_reference": False}


def test_resolved_stages_read_back_with_what_was_chosen_for_each(tmp_path: Path) -> None:
    recipe = load_recipe(STAGED)
    other = dataclasses.replace(SETTINGS, micro_batch_size=2)
    resolved = ResolvedRecipe(
        (
            ResolvedStage("text", SETTINGS, "2026-01-02", {"micro_batch_size": "fits", "remat": "fits too"}),
            ResolvedStage("chat", other, None, {"micro_batch_size": "fits barely"}),
        ),
        evaluate_every=5,
    )
    text = resolved.dump(recipe)
    assert "    micro_batch_size: 4  # fits\n" in text and "    micro_batch_size: 2  # fits barely\n" in text
    assert "  remat: full  # fits too\n" in text
    again = load_recipe(recipe_file(tmp_path, text))
    assert again == resolved.fill(recipe)
    first, second = stages_of(again)
    assert (first.recipe.train.micro_batch_size, second.recipe.train.micro_batch_size) == (4, 2)
    assert first.recipe.data.template_date == "2026-01-02" and second.recipe.data.template_date is None


def test_a_stage_takes_every_option_it_does_not_give_from_train() -> None:
    given = {"name": "a", "data": "x.txt", "batch_size": 4}
    recipe = load_recipe(
        {"model": "m", "train": {"batch_size": 16, "sequence_length": 64, "steps": 9}, "stages": [given]}
    )
    (stage,) = stages_of(recipe)
    assert stage.recipe.train.batch_size == 4
    others = {name for name in TrainSection.model_fields if name != "batch_size"}
    assert all(getattr(stage.recipe.train, name) == getattr(recipe.train, name) for name in others)
    assert set(recipe.model_dump(mode="json")["stages"][0]) == {"name", "data", "optimizer_state", "batch_size"}


def test_overrides_reach_a_stage_by_its_number() -> None:
    recipe = load_recipe(STAGED, ["stages.1.epochs=3", "stages.0.data=other.txt", "stages.0.epochs=1"])
    first, second = stages_of(recipe)
    assert (first.recipe.train.steps, first.recipe.train.epochs, second.recipe.train.epochs) == (None, 1, 3)
    assert first.recipe.data.path == os.path.abspath("other.txt")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"stages": []}, "stages"),
        ({"data": "x.jsonl"}, "Both data and stages"),
        ({"stages": [{"name": "a", "data": "x"}, {"name": "a", "data": "y"}]}, "called a"),
        ({"stages": [{"name": "../a", "data": "x"}]}, "stages[0].name"),
        ({"stages": [{"name": "a"}]}, "stages[0].data"),
        ({"stages": [{"name": "a", "data": "x", "steps": 0}]}, "stages[0].steps"),
        ({"stages": [{"name": "a", "data": "x", "learning_rat": 1}]}, "learning_rat"),
        ({"stages": [{"name": "a", "data": "x", "steps": 4, "warmup_steps": 9}]}, "stages[0].warmup_steps is 9"),
        ({"stages": [{"name": "a", "data": {"path": "x", "pac": True}}]}, "pac"),
    ],
)
def test_stages_that_make_no_sense_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    assert named in refusal({**STAGED, **change}).what


def test_time_limits_are_hours_minutes_seconds() -> None:
    assert [seconds_of(text) for text in ("8h30m", "45m", "90s", "1m30s", "2h")] == [30600, 2700, 90, 90, 7200]
    for wrong in ("8", "h", "1h2", "-3m", "30 m"):
        assert "train.time_limit" in refusal({**SMALLEST, "train": {"time_limit": wrong}}).what
