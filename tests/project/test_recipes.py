"""The four recipes: their data, their options, a small dose of their tiny runs, and README's table of them."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import sys_scan_findings
import tiny_run
from dose import slow_case
from sys_scan_kinds import KINDS, PRODUCERS, STORIES
from typer.testing import CliRunner

import recipes
import trillora
from trillora.cli import app
from trillora.data.rendering.schema import SchemaCheck
from trillora.events import ignore_events
from trillora.recipe.load import load_recipe

SYS_SCAN = recipes.RECIPES / "sys-scan-mistral-7b.yaml"
SCHEMA = recipes.RECIPES / "schemas" / "sys-scan-ground-truth.schema.json"
SAMPLE = recipes.RECIPES / "samples" / "sys-scan-tiny.tar.gz"


# ---- the generated scans


def rows_of(archive: Path) -> list[dict[str, Any]]:
    with tarfile.open(archive) as files:
        texts = [file.read() for member in files if (file := files.extractfile(member)) is not None]
    return [json.loads(line) for text in texts for line in text.splitlines()]


@pytest.mark.parametrize("brief", [False, True])
def test_scans_satisfy_the_schema_and_show_every_producer(brief: bool) -> None:
    check, producers = SchemaCheck(json.loads(SCHEMA.read_text("utf-8"))), set()
    for row in sys_scan_findings.scans(100, brief=brief):
        check.check(row)
        producers |= {finding["id"].rpartition("-")[0] for finding in row["enriched_findings"]}
    assert producers == set(PRODUCERS) == set(KINDS) and len(producers) == 10


def test_correlations_join_findings_that_share_a_value() -> None:
    types = set()
    for row in sys_scan_findings.scans(200):
        by_id = {finding["id"]: finding for finding in row["enriched_findings"]}
        assert len(by_id) == len(row["enriched_findings"])
        for correlation in row["correlations"]:
            members = [by_id[name] for name in correlation["correlation_refs"]]
            assert len(members) >= 2 and all(member["correlation_refs"] == [correlation["id"]] for member in members)
            for name, value in correlation["metadata"].items():
                holders = [member["metadata"][name] for member in members if name in member["metadata"]]
                assert holders and set(map(str, holders)) == {str(value)}
            types.add(correlation["correlation_type"])
    assert types == {story.type for story in STORIES}


def test_the_answer_follows_from_the_findings() -> None:
    for row in sys_scan_findings.scans(100):
        findings, parts = row["enriched_findings"], [*row["enriched_findings"], *row["correlations"]]
        worst = max(parts, key=lambda part: part["risk_score"])
        assert row["summaries"]["severity"] == worst["severity"]
        urgent = {finding["id"] for finding in findings if finding["severity"] in ("medium", "high", "critical")}
        assert {action["finding"] for action in row["actions"]} == urgent
        assert [action["priority"] for action in row["actions"]] == list(range(1, len(urgent) + 1))


def test_the_same_seed_gives_the_same_archive_and_the_sample_is_made_by_it(tmp_path: Path) -> None:
    for name in ("one.tar.gz", "two.tar.gz"):
        sys_scan_findings.main([str(tmp_path / name), "--scans", "300"])
    assert (tmp_path / "one.tar.gz").read_bytes() == (tmp_path / "two.tar.gz").read_bytes()
    assert rows_of(tmp_path / "one.tar.gz") == list(sys_scan_findings.scans(300))
    assert next(sys_scan_findings.scans(1, seed=1)) != next(sys_scan_findings.scans(1))
    assert rows_of(SAMPLE) == list(sys_scan_findings.scans(200, brief=True))
    with pytest.raises(SystemExit):
        sys_scan_findings.main([str(tmp_path / "three.tar.gz"), "--scans", "many"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.tar.gz", "two.tar.gz"]


# ---- the recipe of sys-scan


def test_sys_scan_has_the_options_that_it_is_known_for() -> None:
    recipe = load_recipe(SYS_SCAN)
    lora, train, data = recipe.lora, recipe.train, recipe.data
    assert (lora.rank, lora.alpha, lora.dropout) == (16, 32, 0.05) and len(lora.targets) == 7
    assert (train.optimizer, train.learning_rate, train.weight_decay) == ("lion-8bit", 1e-4, 0.01)
    assert data is not None and data.pack and data.json_schema == str(SCHEMA)
    small = load_recipe(SYS_SCAN, tiny=True)
    assert small.lora == lora and small.train.optimizer == train.optimizer
    assert small.data is not None and small.data.template == data.template and small.data.path == str(SAMPLE)


def test_answers_of_sys_scan_survive_at_its_length_and_not_at_512_tokens(tmp_path: Path) -> None:
    archive = tmp_path / "scans.tar.gz"
    sys_scan_findings.main([str(archive), "--scans", "60"])
    recipe = load_recipe(SYS_SCAN, {"model": "smollm2", "data.path": str(archive), "data.split": None})
    from trillora.data.summary import inspect

    report = inspect(recipe)
    assert report.verdict.ready and (report.rows, report.bad_rows) == (60, 0)
    rows = rows_of(archive)
    mean = sum(len(json.dumps(row)) for row in rows) / len(rows)
    assert 8_000 < mean < 10_500  # characters; the data of sys-scan has 8,900 per row
    short = load_recipe(SYS_SCAN, {"model": "smollm2", "data.path": str(archive), "train.sequence_length": 512})
    assert not inspect(short).verdict.ready


@pytest.mark.parametrize(
    ("member", "text", "what"),
    [
        ("readme.txt", b"no scans here", "no data file"),
        ("scans.jsonl", b'{"version": "ground_truth_v1"}\n', "enriched_findings"),
        ("scans.jsonl", b'{"version": \n', "JSON"),
        (None, b"not an archive", "archive"),
    ],
)
def test_a_bad_archive_is_refused_with_its_reason(tmp_path: Path, member: str | None, text: bytes, what: str) -> None:
    archive = tmp_path / "scans.tar.gz"
    if member is None:
        archive.write_bytes(text)
    else:
        with tarfile.open(archive, "w:gz") as files:
            info = tarfile.TarInfo(member)
            info.size = len(text)
            files.addfile(info, io.BytesIO(text))
    result = CliRunner().invoke(app, ["inspect", str(SYS_SCAN), "--tiny", f"data.path={archive}"])
    assert result.exit_code == 2 and what in result.output, result.output


# ---- all recipes


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of 500, which makes rows longer and steps a hundred times faster. Wide enough for rank 32."""
    return tiny_run.write_model(tmp_path_factory.mktemp("small"), tiny_run.long_llama(width=64))


# JSON with a schema, and chats. test_group.py has phases that are merged, and test_resume.py has stages.
LEARNED = ("sys-scan-mistral-7b", "gemma-3-270m-chat")


@pytest.mark.parametrize("name", [name if name in LEARNED else slow_case(name) for name in recipes.NAMES])
def test_the_tiny_way_of_each_recipe_learns(name: str, small_model: Path, tmp_path: Path) -> None:
    """A few steps of a smaller model; `make recipes` trains all steps of the embedded one."""
    train = {"steps": 6, "sequence_length": 1024, "batch_size": 1, "micro_batch_size": 1}
    evaluate = {"every_steps": 6, "num_samples": 0, "max_documents": 2}
    overrides: dict[str, Any] = {"model": str(small_model), "train": train, "evaluate": evaluate}
    recipe = recipes.RECIPES / f"{name}.yaml"
    trillora.train(recipe, out=tmp_path / "run", tiny=True, listener=ignore_events, **overrides)
    lines = tiny_run.metrics(tmp_path / "run")
    losses = recipes.validation_losses(lines)
    assert losses and all(each["after"] < each["before"] for each in losses.values()), losses
    assert bool(recipes.merged_scores(lines)) == (name == "qwen3-coder-phases")


@pytest.mark.parametrize("shown", recipes.SHOWN, ids=recipes.NAMES)
def test_preflight_of_each_recipe_needs_no_hub(shown: recipes.Shown) -> None:
    options = recipes.sample_data(shown)
    full = load_recipe(shown.file, options)
    assert full.model == load_recipe(shown.file).model and full.train == load_recipe(shown.file).train
    assert all(Path(value).exists() for option, value in options.items() if option.endswith("path"))
    assert bool(options) == (shown.name in ("romanian-mistral-7b", "qwen3-coder-phases"))


def test_the_table_and_the_heads_of_recipes_show_the_measured_results() -> None:
    text = recipes.README.read_text("utf-8")
    shown = text.partition(recipes.START)[2].partition(recipes.END)[0].strip()
    results = recipes.read_results(recipes.RESULTS)
    assert set(results) == set(recipes.NAMES)
    assert shown == recipes.table(results)
    for entry in recipes.SHOWN:
        recipe = entry.file.read_text("utf-8")
        assert recipe == recipes.with_figures(recipe, recipes.figures(results[entry.name]))
    (colab,) = results["gemma-3-270m-chat"]["preflight"]["slices"]
    row = f"{1000 * colab['step_seconds']:.0f} ms | {colab['tokens_per_second']:,.0f} |"
    assert (recipes.ROOT / "docs" / "recipes.md").read_text("utf-8").count(row) == 3, "the rows of its own options"


def test_an_estimate_does_not_replace_the_compilers_answer() -> None:
    def found(method: str) -> dict[str, Any]:
        return {"slices": [{"slice": "v5e-8", "method": method}]}

    results: dict[str, Any] = {}
    assert recipes.add_result(results, "a", "preflight", found("estimate"))
    assert recipes.add_result(results, "a", "preflight", found("compiler"))
    assert not recipes.add_result(results, "a", "preflight", found("estimate"))
    assert results["a"]["preflight"] == found("compiler")


def test_recipes_refuses_an_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        recipes.main(["--table-only", "gemma"])
    assert "gemma-3-270m-chat" in capsys.readouterr().err
