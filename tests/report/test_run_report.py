"""The report of a run: its content, damaged run folders, hostile content, and how a browser shows it."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from canaries import CANARIES
from html_pages import HOSTILE, Page, browse, first_pixel, needs_chromium
from report_page import report
from sample_runs import EVALUATED, facts, write_lines, write_run

from trillora.errors import TrilloraError
from trillora.events import Alarm, Evaluated, Event, Note, Recorded, Sample, Sampled, Skipped, Step, to_metrics_line
from trillora.model.loading.description import EMBEDDED_NOTE
from trillora.report.run.curves.chart import calmed, nice_ticks, smoothed, thinned
from trillora.report.run.read import read_run
from trillora.report.run.status import total_seconds
from trillora.report.run.write import report_listener, write_report
from trillora.secrets import MASK

FILES = ("run.json", "metrics.jsonl", "history.jsonl", "resolved.yaml", "eval.json")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


# Content


def test_report_of_a_finished_run_is_complete_and_in_order(run: Path) -> None:
    text = Page(report(run)).text
    expected = [
        *("SmolLM2-135M-Instruct on ro-wiki.txt.zst, findings.jsonl", "14 November 2026", "8 x TPU v5e"),
        *("The adapter is from step 300, the best on validation data, and the last.",),
        *(
            "Finished: 300 steps in 20 min.",
            "Evaluation loss fell by",
            "2 of 3 answers as expected, 0 before training.",
        ),
        *("evaluation loss", "perplexity", "token accuracy", "tokens trained on", "training time", "tokens per second"),
        *("measured memory", "skipped steps"),
        *("Curves", "evaluation", "best", "romanian", "Learning rate", "Tokens per second"),
        *("Answers before and after", "AwsEc2Snapshot", "the base model", "Sure! Here", "step 300", "Expected"),
        *("Test set", "findings-test.jsonl, 200 rows", "valid JSON", "100", "severity", "47", "Data"),
        *("120 steps of 8 sequences of 512 tokens", "4,120 documents", "One training document", "Munții Apuseni"),
        *("Skipped steps", "210", "the loss was not finite", "findings.jsonl:812", "Use the result", "trillora chat"),
        *("PeftModel", "History", "SIGTERM", "resumed", "finished", "Environment", "0.10.2"),
        *("Model and data", "134,515,008", "c1c1", "Resolved recipe", "micro_batch_size: 4", "Trillora 0.5.0"),
    ]
    place = 0
    for words in expected:
        assert words in text[place:], words
        place = text.index(words, place)


def test_the_page_describes_the_adapter_of_the_best_step(tmp_path: Path) -> None:
    """Its scores and its answers, although the run continued and became worse."""
    run = write_run(tmp_path / "run", num_steps=4)
    losses, answers = {0: 4.0, 2: 1.0, 4: 2.0}, {0: "base says", 2: "right", 4: "overtrained"}
    events: list[Any] = [Step(n, 4, "chat", 3.0, 1e-3, 0.5, False, 1234.0, n, 9.0, 0.1) for n in range(1, 5)]
    events += [Evaluated(n, "chat", loss, math.exp(loss), 0.5, 100, n == 2) for n, loss in losses.items()]
    events += [
        Sampled(n, "chat", (Sample("?", words, "right"), Sample("??", "x", "y"))) for n, words in answers.items()
    ]
    (run / "metrics.jsonl").write_text("".join(f"{to_metrics_line(event)}\n" for event in events))
    manifest = {**facts(4, 0), "adapter": {"step": 2, "evaluation_loss": 1.0}}
    (run / "run.json").write_text(json.dumps(manifest))
    page = report(run)
    text = Page(page).text
    first = "The adapter is from step 2, the best on validation data; the run continued to step 4."
    assert first in text[: text.index("Finished: 4 steps")]
    assert "Evaluation loss fell by 75\u00a0%, from 4.00 to 1.00" in text and "<small>4.00 →</small>" in page
    assert "1 of 2 answers as expected, 0 before training." in text
    assert "After, step 2" in text and "overtrained" not in text and "step 4as" not in text
    manifest["adapter"] = {"step": 4, "evaluation_loss": None}
    (run / "run.json").write_text(json.dumps(manifest))
    text = Page(report(run)).text
    assert "The adapter is from step 4, the last one." in text and "After, step 4" in text and "overtrained" in text


def test_an_unfinished_run_shows_its_latest_answers(tmp_path: Path) -> None:
    text = Page(report(write_run(tmp_path / "run", ended="stopped"))).text
    assert "The adapter is from" not in text and "After, step 175" in text
    assert "Evaluation loss fell by 62\u00a0% until step 175, from 2.31 to 0.888" in text
    assert "2 of 3 answers as expected, 0 before training." in text


def test_trained_parts_of_the_example_are_marked(run: Path) -> None:
    assert re.search(r"<mark>\{&#34;provider&#34;[^<]*</mark><mark><span class=\"special\">&lt;\|im_end", report(run))


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        ("stopped", "Stopped at step 180 of 300: time limit of 30m reached."),
        ("diverged", "Diverged at step 180 of 300: 5 steps in a row were not finite."),
        ("running", "Running: step 180 of 300"),
    ],
)
def test_unfinished_run_says_so_and_how_to_resume(tmp_path: Path, ended: str, words: str) -> None:
    run = write_run(tmp_path / "a run", ended=ended)
    text = Page(report(run)).text
    assert words in text
    assert ("newest checkpoint is from step 150" in text) == (ended != "running")
    assert (f"trillora train '{run}/resolved.yaml' --out '{run}'" in text) == (ended != "diverged")
    assert "checkpoints/step-00000150" in text  # the snippet loads the newest checkpoint


def snippet(page: str) -> str:
    """The printed Python code that loads the adapter."""
    text = Page(page).text
    return text[text.index("from peft") : text.index("History")]


def test_snippet_names_the_adapter_and_the_base_on_the_hub(run: Path) -> None:
    code = snippet(report(run))
    compile(code.partition(EMBEDDED_NOTE)[0], "report", "exec")
    assert json.dumps(str(run / "adapter")) in code and '"HuggingFaceTB/SmolLM2-135M-Instruct"' in code
    assert '"smollm2"' not in code, "a short name of ours, unknown to the hub"
    assert EMBEDDED_NOTE in code, "the base on the hub is not the one that was trained on"
    (run / "run.json").write_text((run / "run.json").read_text().replace('"smollm2"', '"owner/other"'))
    assert EMBEDDED_NOTE not in report(run)


def test_the_snippet_scales_the_positions_of_the_base(run: Path) -> None:
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    content = {"rope_parameters": parameters, "max_position_embeddings": 256}
    (run / "adapter" / "rope.json").write_text(json.dumps(content))
    code = snippet(report(run)).partition(EMBEDDED_NOTE)[0]
    compile(code, "report", "exec")
    assert "import AutoConfig, AutoModelForCausalLM, AutoTokenizer" in code and "config=config, dtype" in code
    [values] = re.findall(r"get_text_config\(\)\.update\((.*)\)\n", code)
    assert json.loads(values.replace("'", '"')) == content
    (run / "adapter" / "rope.json").write_text("[]")
    assert "AutoConfig" not in snippet(report(run))


def test_the_snippet_of_a_checkpoint_says_that_positions_are_scaled(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ended="stopped")
    assert "model.rope" not in snippet(report(run))
    recipe = (run / "resolved.yaml").read_text()
    (run / "resolved.yaml").write_text(recipe + "model:\n  name: smollm2\n  rope: {type: yarn, factor: 4.0}\n")
    code = snippet(report(run))
    assert "# Add the scaling of the recipe's model.rope" in code and "AutoConfig" not in code


def test_equal_json_counts_as_the_expected_answer(run: Path) -> None:
    assert report(run).count(">as expected<") == 2 + 1  # two of the three prompts; one example with other spacing


def test_metrics_are_read_back_as_the_events_that_were_written(run: Path) -> None:
    step = Step(7, 9, "chat", 1.5, 1e-3, 0.5, True, 1234.0, 2.0, 9.0, 0.1, 1.25, None, num_tokens=80)
    bad = replace(step, step=8, loss=math.inf, grad_norm=-math.inf)
    events: list[Any] = [
        *(step, bad, Skipped(7, "chat", "the loss was not finite", ("a.jsonl:3", "b.jsonl:4"))),
        *(
            Evaluated(7, "chat", 1.0, math.e, 0.5, 100, True),
            Sampled(7, "chat", (Sample("p", "a"), Sample("p", "a", "x"))),
        ),
    ]
    (run / "metrics.jsonl").write_text("".join(f"{to_metrics_line(event)}\n" for event in events))
    read = read_run(run)
    assert [*read.steps, *read.skips, *read.evaluations, *read.samples] == events
    assert to_metrics_line(Note("not a metric")) is None


def test_repeated_steps_replace_earlier_lines(run: Path) -> None:
    again = [{"kind": "step", "step": step, "stage": "chat", "loss": 7.0} for step in (299, 300)]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in again)
    read = read_run(run)
    assert len(read.steps) == 300 and [line.loss for line in read.steps[-3:]][1:] == [7.0, 7.0]


def test_training_time_is_the_sum_over_all_processes(run: Path) -> None:
    assert total_seconds(read_run(run).steps) == pytest.approx(4.1 * 300)  # the second process started at step 121


def test_report_replaces_the_old_page_and_leaves_no_other_file(run: Path) -> None:
    (run / "report.html").write_text("old")
    before = {path.name for path in run.iterdir()}
    assert write_report(run) == run / "report.html"
    assert {path.name for path in run.iterdir()} == before
    assert (run / "report.html").read_text("utf-8").endswith("</html>\n")


def test_the_report_follows_the_events_and_cannot_stop_training(run: Path) -> None:
    heard: list[Event] = []
    listen = report_listener(run, heard.append)
    listen(Note("a step"))
    assert not (run / "report.html").exists()
    listen(Recorded(300))
    assert (run / "report.html").exists() and heard == [Note("a step"), Recorded(300)]
    (run / "report.html").unlink()
    (run / "report.html").mkdir()  # cannot be replaced by a file
    listen(Recorded(301))
    assert isinstance(heard[-1], Alarm) and "report could not be written" in heard[-1].text


# Damaged folders


@pytest.mark.parametrize("missing", FILES)
def test_any_file_may_be_missing(run: Path, missing: str) -> None:
    (run / missing).unlink()
    Page(report(run))


@pytest.mark.parametrize("only", FILES[:4])
def test_one_file_makes_a_run(tmp_path: Path, run: Path, only: str) -> None:
    (tmp_path / "other").mkdir()
    shutil.copy(run / only, tmp_path / "other" / only)
    Page(report(tmp_path / "other"))


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrilloraError, match="not a run"):
        write_report(tmp_path)
    with pytest.raises(TrilloraError, match="There is no run"):
        write_report(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_every_file_may_end_anywhere(tmp_path: Path) -> None:
    whole, cut = write_run(tmp_path / "whole", num_steps=8), tmp_path / "cut"
    tried = 0
    for name in FILES:
        content = (whole / name).read_bytes()
        for end in range(0, len(content), max(len(content) // 13, 1)):
            shutil.copytree(whole, cut)
            (cut / name).write_bytes(content[:end])
            Page(report(cut))
            shutil.rmtree(cut)
            tried += 1
    assert tried >= 5 * 13


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -1,
        0,
        1e308,
        10**400,
        "nan",
        "-inf",
        "words",
        [],
        {},
        [None],
        {"a": {"b": 1}},
        [[]],
        "\ud800\x00\x1b[2J",
    ],
    ids=lambda value: type(value).__name__ + str(value)[:8].encode("ascii", "replace").decode(),
)
def test_every_value_may_be_anything(tmp_path: Path, value: Any) -> None:
    """Each field of each file replaced, one file at a time."""
    run = write_run(tmp_path / "run", num_steps=12)

    def spoilt(inside: Any, depth: int = 0) -> Any:
        if isinstance(inside, dict) and depth < 4:
            return {key: inner if key == "kind" else spoilt(inner, depth + 1) for key, inner in inside.items()}
        return [spoilt(inner, depth + 1) for inner in inside] if isinstance(inside, list) else value

    for name, content in (("run.json", facts(12, 4)), ("eval.json", EVALUATED)):
        for key in content:
            (run / name).write_text(json.dumps({**content, key: value}))
            Page(report(run))
        (run / name).write_text(json.dumps(spoilt(content)))
        Page(report(run))
        (run / name).write_text(json.dumps(value))
        Page(report(run))
    for name in ("metrics.jsonl", "history.jsonl"):
        lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
        write_lines(run / name, [{**spoilt(line), "step": line["step"]} for line in lines])
        Page(report(run))
        write_lines(run / name, [spoilt(line) for line in lines])
        Page(report(run))


def test_unreadable_lines_are_counted_except_an_incomplete_last_one(run: Path) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe not json\n[1, 2]\n{"kind": "st')
    assert read_run(run).num_unreadable == 2
    assert "2 log lines are unreadable" in report(run)


def test_a_long_run_is_a_small_page_and_keeps_its_spikes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=12_000)
    page = report(run)
    assert len(page.encode()) < 1_000_000
    assert "above the chart, up to 11.5" in page
    points = [(float(step), 1.0) for step in range(100_000)]
    points[77_777], points[31_415] = (77_777.0, 9.0), (31_415.0, -9.0)
    kept = thinned(points)
    assert len(kept) <= 1600 and {points[77_777], points[31_415], points[0], points[-1]} <= set(kept)
    assert kept == sorted(kept)


def test_a_thousand_stages_files_and_prompts_stay_a_small_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=20)
    manifest = facts(20, 8)
    manifest["stages"][1]["files"] *= 1000
    (run / "run.json").write_text(json.dumps(manifest))
    samples = [{"prompt": f"{number} " * 3000, "answer": "x" * 20_000, "expected": None} for number in range(60)]
    skips = [{"kind": "skipped", "step": n, "stage": "chat", "reason": "?", "rows": ["f:1"] * 99} for n in range(999)]
    write_lines(run / "metrics.jsonl", [{"kind": "samples", "step": 1, "stage": "chat", "samples": samples}, *skips])
    page = report(run)
    assert len(page.encode()) < 1_000_000 and "and 950 more" in page


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (0.4, 3.7), (0, 6e-4), (1, 2), (99_000, 100_000), (-3, 5), (0, 1e-11)]
)
def test_ticks_are_few_and_span_the_values(low: float, high: float) -> None:
    ticks = nice_ticks(low, high, 5)
    slack = (high - low) * 1e-6
    assert ticks[0] <= low + slack and ticks[-1] >= high - slack and 2 <= len(ticks) <= 8


def test_a_single_spike_does_not_move_the_smooth_line() -> None:
    points = [(float(step), 2.0) for step in range(100)]
    points[50] = (50.0, 100.0)
    assert smoothed(calmed(points), 5) == [(float(step), pytest.approx(2.0)) for step in range(100)]


def test_the_smooth_line_begins_at_the_first_point_and_ends_near_the_last() -> None:
    falling = [(1.0, 4.6), (2.0, 2.9), (3.0, 2.4), (4.0, 2.2)]
    smooth = smoothed(calmed(falling), 2)
    assert smooth[0] == (1.0, pytest.approx(4.6)) and smooth[0][1] > smooth[1][1] > smooth[2][1] > smooth[3][1]
    assert calmed(falling)[-1] == falling[-1] and calmed([(1.0, 3.0)]) == [(1.0, 3.0)]


def test_a_report_needs_no_jax_and_no_torch(run: Path) -> None:
    code = (
        f"import sys; from pathlib import Path; from trillora.report.run.write import write_report; "
        f"write_report(Path({str(run)!r})); assert not {{'jax', 'torch', 'transformers', 'numpy'}} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Hostile content and secrets


def hostile_run(folder: Path) -> Path:
    run = write_run(folder / "ru<b>n", num_steps=40)

    def planted(value: Any) -> Any:
        if isinstance(value, dict):
            return {(key if key in KEPT else key + HOSTILE): planted(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [planted(inner) for inner in value]
        return value + HOSTILE if isinstance(value, str) else value

    for name in ("run.json", "eval.json"):
        (run / name).write_text(json.dumps(planted(json.loads((run / name).read_text()))), "utf-8")
    for name in ("metrics.jsonl", "history.jsonl"):
        lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
        kept = [{key: line[key] for key in ("kind", "event") if key in line} for line in lines]
        write_lines(run / name, [{**planted(line), **keep} for line, keep in zip(lines, kept, strict=True)])
    (run / "resolved.yaml").write_text(f"model: {HOSTILE}\n", "utf-8")
    config = {"base_model_name_or_path": HOSTILE}
    (run / "adapter" / "adapter_config.json").write_text(json.dumps(config), "utf-8")
    return run


KEPT = {
    *(
        "kind",
        "step",
        "stage",
        "loss",
        "samples",
        "prompt",
        "answer",
        "expected",
        "reason",
        "rows",
        "name",
        "files",
        "data",
    ),
    *(
        "model",
        "environment",
        "identity",
        "stages",
        "example",
        "text",
        "trained",
        "special",
        "sha256",
        "format",
        "device",
    ),
    *(
        "base",
        "adapter",
        "majority",
        "examples",
        "fields",
        "time",
        "event",
        "machine",
        "started",
        "trillora",
        "first_step",
    ),
}


def test_markup_in_every_field_is_only_text(tmp_path: Path) -> None:
    run = hostile_run(tmp_path)
    page = report(run)
    plain = Page(report(write_run(tmp_path / "plain", num_steps=40)))
    assert Page(page).names <= plain.names
    assert "script" not in plain.names and not any(".on" in name or name.endswith(".src") for name in plain.names)
    assert page.count("&lt;script&gt;") > 100
    for character in "\x00\x1b\u202e\x07":
        assert character not in page
    assert r"\x1b[31m" in page and r"\u202e" in page  # made visible


def test_no_secret_reaches_the_page(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "canary-of-the-environment-0")
    everything = " ".join([*CANARIES.values(), "canary-of-the-environment-0"])
    manifest = facts(300, 120)
    manifest["model"]["name"] = manifest["model"]["base_name"] = manifest["identity"]["data"] = everything
    manifest["stages"][0]["name"] = manifest["stages"][0]["files"][0]["name"] = everything
    manifest["stages"][1]["example"][1]["text"] = manifest["environment"][everything] = everything
    (run / "run.json").write_text(json.dumps(manifest))
    (run / "resolved.yaml").write_text(f"data: {json.dumps(everything)}\ntracking: {{api_key: canary}}\n")
    (run / "eval.json").write_text(json.dumps({**EVALUATED, "data": everything, "majority": {everything: 0.5}}))
    sample = {"prompt": everything, "answer": everything, "expected": everything}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "samples", "step": 300, "stage": everything, "samples": [sample]}) + "\n")
        file.write(json.dumps({"kind": "step", "step": 301, "stage": everything, "loss": 1}) + "\n")
        file.write(
            json.dumps({"kind": "skipped", "step": 3, "stage": everything, "reason": everything, "rows": [everything]})
        )
    with (run / "history.jsonl").open("a") as file:
        file.write(json.dumps({"time": everything, "event": "stopped", "step": 301, "reason": everything}) + "\n")
    page = report(run)
    assert page.count(MASK) > 100
    assert "canary" not in page.lower() and "ca0a12" not in page


# In a browser


@needs_chromium
def test_a_browser_shows_it_in_light_and_dark_without_error_or_request(run: Path, tmp_path: Path) -> None:
    page, images = write_report(run), []
    for name, option in (("light", "preferredColorScheme=1"), ("dark", "preferredColorScheme=0")):
        images.append(tmp_path / f"{name}.png")
        console, requested, _ = browse(page, tmp_path, f"--screenshot={images[-1]}", f"--blink-settings={option}")
        assert console == [] and requested == []
    assert [first_pixel(image) for image in images] == [(0xF4, 0xF5, 0xF3), (0x12, 0x16, 0x14)]
    assert all(image.stat().st_size > 30_000 for image in images)  # an empty page is a few kB


@needs_chromium
def test_a_hostile_run_does_nothing_in_a_browser(tmp_path: Path) -> None:
    page = write_report(hostile_run(tmp_path))
    console, requested, _ = browse(page, tmp_path, f"--screenshot={tmp_path / 'page.png'}")
    assert console == [] and requested == []


@needs_chromium
def test_browse_reports_scripts_and_requests(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(f"<!DOCTYPE html><body>{HOSTILE}".replace("\x00", ""), "utf-8")
    console, requested, _ = browse(page, tmp_path, f"--screenshot={tmp_path / 'page.png'}")
    assert any("OWNED" in line for line in console) and "http://127.0.0.1:9/" in requested


@needs_chromium
@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_is_wider_than_the_window(tmp_path: Path, width: int) -> None:
    run = hostile_run(tmp_path)  # long words in every field
    measure = "<script>document.title = 'measured ' + document.documentElement.scrollWidth</script></body>"
    page = report(run).replace("</body>", measure).replace("<details", "<details open")
    inside = tmp_path / "inside.html"
    inside.write_text(re.sub(r"<meta http-equiv[^>]*>", "", page), "utf-8")
    frame = tmp_path / "frame.html"  # a window has a minimum width, a frame has none
    frame.write_text(
        f'<!DOCTYPE html><iframe src="inside.html" width="{width}" height="900" style="border:0"></iframe>'
        "<script>onload = () => { document.title = document.querySelector('iframe')"
        ".contentDocument.documentElement.scrollWidth }</script>",
        "utf-8",
    )
    _, _, dom = browse(frame, tmp_path, "--dump-dom", "--allow-file-access-from-files", width=1300)
    found = re.search(r"<title>(\d+)</title>", dom)
    assert found is not None and math.isclose(int(found[1]), width)
