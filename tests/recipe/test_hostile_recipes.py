"""Recipes that are wrong on purpose: every one is refused with a short error, in little time.

The fuzzer changes valid recipes at random: values, types, nesting, characters, YAML syntax, overrides. What is accepted
must be the same after `recipe.json`.
"""

from __future__ import annotations

import copy
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dose import dose, log_progress

from trillora.errors import TrilloraError
from trillora.files.user_path import user_path
from trillora.recipe import run_file, yaml
from trillora.recipe.load import load_recipe, load_run_recipe, options
from trillora.recipe.schema import MAX_STEPS, stages_of
from trillora.runs.files import RECIPE_FILE

SMALLEST: dict[str, Any] = {"model": "smollm2", "data": "train.jsonl"}
LONG = 10.0  # seconds; each case takes milliseconds


def refusal(source: Any, *overrides: str) -> TrilloraError:
    start = time.monotonic()
    with pytest.raises(TrilloraError) as caught:
        load_recipe(source, overrides)
    assert time.monotonic() - start < LONG
    assert len(str(caught.value)) < 20_000
    return caught.value


# Numbers


@pytest.mark.parametrize(
    ("override", "limit"),
    [
        ("train.learning_rate=1e39", "1e+06"),
        ("train.weight_decay=1e300", "1,000"),
        ("train.epochs=1e300", "1,000,000"),
        ("train.steps=2147483648", "1,000,000,000"),
        ("train.warmup_steps=1000000000000", "1,000,000,000"),
        ("train.sequence_length=1000000000", "16,777,216"),
        ("train.batch_size=1000000000000", "1,048,576"),
        ("train.keep_checkpoints=1e15", "1,000,000,000"),
        ("train.max_grad_norm=1e300", "1e+12"),
        ("lora.rank=1000000", "65,536"),
        ("lora.alpha=1e39", "1e+06"),
        ("lora.dropout=0.9999999999", "0.99"),
        ("evaluate.max_tokens=1e12", "16,777,216"),
        ("hardware.mesh.data=1e12", "1,048,576"),
        ("engine.loss_chunk=1e12", "1,000,000,000"),
    ],
)
def test_a_number_beyond_its_limit_is_refused_with_the_limit(override: str, limit: str) -> None:
    error = refusal(SMALLEST, override)
    assert override.partition("=")[0] in error.what
    assert limit in error.do


def numbers(annotation: Any) -> list[dict[str, Any]]:
    found = [annotation] if annotation.get("type") in ("integer", "number") else []
    return found + [one for inner in annotation.get("anyOf", []) for one in numbers(inner)]


def test_every_number_of_a_recipe_has_a_lower_and_an_upper_limit() -> None:
    schema = json.loads((Path(__file__).parents[2] / "docs" / "recipe.schema.json").read_text("utf-8"))
    found = [
        (section, name, number)
        for section, definition in schema["$defs"].items()
        for name, node in definition["properties"].items()
        for number in numbers(node)
    ]
    assert len(found) > 30
    for section, name, number in found:
        low = number.get("minimum", number.get("exclusiveMinimum"))
        high = number.get("maximum", number.get("exclusiveMaximum"))
        assert low is not None and high is not None and high <= 1e12, (section, name)


def test_numbers_that_are_too_large_together_are_refused() -> None:
    assert "tokens per step" in refusal(SMALLEST, "train.batch_size=1048576", "train.sequence_length=4096").what
    assert "weight_decay" in refusal(SMALLEST, "train.learning_rate=10", "train.weight_decay=1").what
    (stage,) = stages_of(load_recipe(SMALLEST, ["train.epochs=1000000"]))
    assert stage.recipe.train.num_steps(1000) == MAX_STEPS
    with pytest.raises(TrilloraError, match="1,001,000,000 steps"):
        stage.recipe.train.num_steps(1001)


@pytest.mark.parametrize("limit", ["9" * 5000 + "h", "1234567h"])
def test_a_time_limit_is_bounded(limit: str) -> None:
    assert "train.time_limit" in refusal(SMALLEST, f"train.time_limit={limit}").what


def test_a_date_that_does_not_exist_is_refused() -> None:
    assert "data.template_date" in refusal(SMALLEST, "data.template_date=2024-13-45").what


# Recipes that took minutes


def test_a_bomb_of_merge_keys_is_refused_at_once(tmp_path: Path) -> None:
    text = "l0: &l0 {a: 1, b: 2}\n"
    text += "".join(f"l{i}: &l{i} {{<<: [{', '.join([f'*l{i - 1}'] * 9)}]}}\n" for i in range(1, 9))
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    assert "100,000 values" in refusal(file).what


def test_merge_keys_still_work() -> None:
    text = "p: {q: &b {<<: {x: 1, y: 1}, x: 2}}\nc: {<<: *b}"
    assert yaml.parse(text, "here") == {"p": {"q": {"x": 2, "y": 1}}, "c": {"x": 2, "y": 1}}


def test_divisors_of_a_large_batch_are_found_at_once() -> None:
    error = refusal(SMALLEST, "train.batch_size=1000000", "train.micro_batch_size=7")
    assert error.do == "use auto, or one of 1, 2, 4, 5, 8, 10, 16, 20"


@pytest.mark.parametrize(
    "many",
    [
        {f"key{number}": 1 for number in range(20_000)},
        {"evaluate": {"prompts": [1] * 20_000}},
        {"data": [{"path": 1, "wight": 2}] * 20_000},
        {"stages": [{"nam": "a"}] * 5_000},
        {"lora": {"x" * 100_000: 1}},
    ],
    ids=["keys", "prompts", "sources", "stages", "name"],
)
def test_many_problems_are_counted_not_listed(many: dict[str, Any]) -> None:
    text = str(refusal({**SMALLEST, **many}))
    assert text.count("also:") <= 20
    assert "more" in text or "lora" in many


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "large"])
def test_only_a_regular_file_of_bounded_size_is_read(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "recipe.yaml"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "folder":
        file.mkdir()
    else:
        file.write_bytes(b"a" * (1 << 21))
    assert "cannot be" in refusal(file).what


# Tags and paths


@pytest.mark.parametrize("tag", ['!!bool "x"', '!!timestamp "x"', "!!binary x", "!!int x", "!!float x", "!!null x"])
def test_a_tag_that_does_not_fit_is_refused(tag: str) -> None:
    error = refusal(SMALLEST, f"model={tag}")
    assert "Not valid YAML" in error.what and "tags are not allowed" in error.do


@pytest.mark.parametrize("option", ["data.path", "data.validation", "data.json_schema", "data.chat_template"])
def test_a_path_that_no_file_can_have_is_refused(option: str) -> None:
    assert refusal(SMALLEST, f'{option}="./a\\0b"').where == option
    assert "too long" in refusal(SMALLEST, f"{option}=./{'a' * 300}").what
    assert "too long" in refusal(SMALLEST, f"{option}=./{'a/' * 3000}").what


def test_the_other_paths_of_a_recipe_are_checked_too() -> None:
    assert "too long" in refusal(SMALLEST, f"model={'a' * 5000}").what
    assert "too long" in refusal(SMALLEST, f"train.checkpoint_dir={'a' * 5000}").what
    assert "too long" in refusal("r" * 5000).what
    assert "no file name" in refusal({"model": "m", "stages": [{"name": "a", "data": ["x", "\0"]}]}).what


def test_a_tilde_without_a_user_is_part_of_the_name(tmp_path: Path) -> None:
    assert load_recipe(SMALLEST, ["data=~backup.jsonl"]).data.path == str(Path.cwd() / "~backup.jsonl")
    assert user_path("~/x", where="here") == Path.home() / "x"


def test_an_override_of_an_item_that_does_not_exist_is_refused() -> None:
    two = {**SMALLEST, "data": ["a.jsonl", "b.jsonl"]}
    assert "no item 2" in refusal(two, "data.path.2.weight=3").what
    recipe = load_recipe(two, ["data.path.01=c.jsonl", "data.path.0.weight=3"])
    first, second = recipe.data.path
    assert (first.weight, second.path) == (3.0, str(Path.cwd() / "c.jsonl"))


# Secrets in what is wrong


@pytest.mark.parametrize(
    "override",
    [
        'train.steps="s3://k:hunter2x@b"',
        'data={path: "https://u:hunter2x@h/x.jsonl", bogus: 1}',
        "model.token=hf_hunter2xhunter2x",
        'model.name="https://u:hunter2x@host/m"',
        "train={steps: {password: hunter2x}}",
        'train.steps="' + "a" * 30 + ' s3://k:hunter2x@b"',
        "train.steps=[hunter2x, hf_hunter2xhunter2x]",
        "data={password=hunter2x",
        "hf_hunter2xhunter2x",
    ],
)
def test_no_error_repeats_a_secret(override: str) -> None:
    assert "hunter2x" not in str(refusal(SMALLEST, override))


# The fuzzer

VALID: tuple[dict[str, Any], ...] = (
    SMALLEST,
    {
        "model": {"name": "org/model", "revision": "main", "dtype": "float32"},
        "data": {
            "path": ["a.jsonl", {"path": "https://host/b.jsonl", "weight": 0.5}],
            "template": {"prompt": "{{ user }} has password: {{ password }}, ", "completion": "{{ strength }}"},
            "split": {"validation": 0.1, "test": 0.3},
            "json_schema": "s.json",
        },
        "lora": {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]},
        "train": {
            "steps": 5,
            "warmup_steps": 2,
            "schedule": "wsd",
            "time_limit": "8h30m",
            "checkpoint_dir": "gs://b/r",
        },
        "evaluate": {"prompts": ["hi", "token: x"], "patience": 2},
    },
    {
        "model": "./model",
        "train": {"batch_size": 16, "epochs": 2.5, "micro_batch_size": 4},
        "stages": [
            {"name": "one", "data": "text.txt", "steps": 3, "optimizer_state": "restart"},
            {"name": "two", "data": {"path": "chats.jsonl", "pack": False, "num_length_buckets": 3}, "epochs": 2},
        ],
        "hardware": {"mesh": {"fsdp": 2}, "devices": 2},
        "engine": {"remat": "full", "attention": "xla", "loss_chunk": 512},
        "track": {"services": ["wandb"], "project": "p"},
    },
)
NUMBERS = (0, 1, -1, 2, 7, 0.5, 1e-300, 1e300, 2**31, 2**63, 10**400, float("inf"), float("nan"), True, False)
TEXTS = (
    *("", "auto", "yes", "null", "~", "~x", "./x", "../..", "/", "a" * 300, "a/" * 3000, "{x}", "{{ a }}", "%s", "1e5"),
    *("\0", "\ud800", "é☃😀", "\u202e", "\x1b[31m", "•••", "<<", "*a", "&a", "!!bool x", "a: b", "# c", "a\nb", "\t"),
    *(
        "https://u:p@h/x.jsonl",
        "s3://b/x?versionId=1",
        "org/name",
        "hf_abcdefgh1",
        "2024-13-45",
        "9" * 5000 + "h",
        "[0]",
    ),
)
PLAIN: tuple[Callable[[], Any], ...] = (list, dict, lambda: None, lambda: [[]], lambda: {"0": 1}, lambda: {1: 2})


def any_value(dice: random.Random) -> Any:
    kind = dice.randrange(4)
    if kind == 0:
        return dice.choice(NUMBERS)
    if kind == 1:
        return "".join(dice.choices(TEXTS, k=dice.choice((1, 1, 1, 2))))
    return dice.choice(PLAIN)() if kind == 2 else [any_value(dice) for _ in range(dice.randrange(3))]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a value with each of its keys."""
    inner = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    return [place for key, item in inner for place in ((value, key), *places(item))]


def changed(recipe: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    recipe = copy.deepcopy(recipe)
    for _ in range(dice.choice((0, 1, 1, 1, 2, 5))):
        if not (all_places := places(recipe)):
            break
        holder, key = dice.choice(all_places)
        change = dice.randrange(5)
        if change == 0 and isinstance(holder, dict):
            holder[dice.choice((*TEXTS, *KNOWN, 1, None, True))] = any_value(dice)
        elif change == 1:
            del holder[key]
        elif change == 2:
            holder[key] = [holder[key]] * dice.randrange(4)
        elif change == 3:
            holder[key] = {str(dice.choice((0, 1, "path", "name"))): holder[key]}
        else:
            holder[key] = any_value(dice)
    return recipe


KNOWN = [name.rpartition(".")[2] for name in options()]


def any_override(dice: random.Random) -> str:
    name = dice.choice([*options(), *TEXTS])
    if dice.random() < 0.3:
        name = name.replace(".", f".{dice.choice((0, 1, 99, '²', ''))}.", 1)
    value = dice.choice((*TEXTS, "[1, 2]", "{a: 1}", "{path: x}", "5", "1e39", "!!bool x", "[", "*a", "&a [*a]"))
    return dice.choice((f"{name}={value}", f"{name}={value}", f"{name}", f"{name}={{{value}: 1}}"))


def broken(text: str, dice: random.Random) -> str:
    """YAML text with a few characters added, removed or repeated."""
    for _ in range(dice.choice((0, 0, 1, 3))):
        at = dice.randrange(len(text) + 1)
        piece = dice.choice(("", *TEXTS, *"[]{}:,\n \t-?|>'\"", text[at : at + 20] * 3))
        text = text[:at] + piece + text[at + dice.randrange(8) :]
    return text


def test_no_recipe_ends_in_a_traceback_and_an_accepted_one_survives_its_file(tmp_path: Path) -> None:
    dice, num_accepted, slowest = random.Random(13), 0, 0.0
    run, file = tmp_path / "run", tmp_path / "recipe.yaml"
    run.mkdir()
    for number in range(total := dose(200, 10_000)):
        tree = changed(dice.choice(VALID), dice)
        overrides = [any_override(dice) for _ in range(dice.choice((0, 0, 1, 2)))]
        source: Any = tree
        if dice.random() < 0.6:
            try:
                text = broken(yaml.write(tree), dice)
                file.write_bytes(text.encode("utf-8", "surrogatepass"))
            except (ValueError, TypeError):  # what YAML cannot write: huge numbers, keys of mixed types
                continue
            source = file
        start = time.monotonic()
        try:
            recipe = load_recipe(source, overrides)
        except TrilloraError as error:
            assert error.what and error.do and len(str(error)) < 50_000, f"{number}: {tree} {overrides}"[:2000]
        except Exception as error:
            raise AssertionError(f"{number}: {source if source is tree else text!r} {overrides}"[:2000]) from error
        else:
            num_accepted += 1
            (run / RECIPE_FILE).write_text(run_file.dump(recipe))
            again = load_run_recipe(run)
            if not again.saved.withheld:
                assert again.recipe == recipe, f"{number}: {tree} {overrides}"[:2000]
            else:
                with pytest.raises(TrilloraError, match="credentials"):
                    load_recipe(run / RECIPE_FILE)
        slowest = max(slowest, time.monotonic() - start)
    assert slowest < LONG
    assert num_accepted > total / 20, "most changes are refused, but not all"
    log_progress(f"recipes: {total} tried, {num_accepted} accepted, the slowest took {slowest:.2f} s")
