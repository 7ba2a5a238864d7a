"""Figures in README and docs come from records, and say how old they are (tools/claims.py, benchmarks/record.py)."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import claims
import pytest
import record
from claim_records import changed_since, git, read_records

ROOT = Path(__file__).parents[2]
CHANGED = claims.CHANGED
SENTENCE = """It is 2.50<!-- claim: speed.ratio --> times as fast, in 1:05<!-- claim: speed.seconds -->.

<!-- measured: start -->
<!-- measured: end -->
"""


# ---- the documents of this repository


def test_every_figure_of_the_documents_is_that_of_its_record() -> None:
    records = read_records(ROOT)
    names = claims.documents(ROOT)
    problems = [problem for name in names for problem in claims.problems_of(ROOT, name, records)]
    assert problems == []
    shown = {name: claims.read(ROOT, name, records) for name in names}
    for document in shown.values():
        document.as_it_should_be()
    assert len(shown["README.md"].claims) >= 10 and len(shown["docs/status.md"].claims) >= 10 and len(names) > 20
    assert sum(len(document.claims) for document in shown.values()) > 50


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("Trillora is 3.4 times as fast.", ["3.4"]),
        ("It takes 12 minutes and 7.5 GiB.", ["12", "7.5"]),
        ("All but eleven of 142 models pass.", ["142", "eleven"]),
        ("| speed | **1.31** | -5 % |", ["-5 %", "1.31"]),
        ("[98,541](docs/speed.md) tokens/s", ["98,541"]),
        ("losses agree to 2e-5, in 5:54 minutes", ["2e-5", "5:54"]),
        ("with Python 3.11 or newer on v5e-8 and `--rows 7`, H200, SmolLM2-135M, q4_0, [guide](docs/7.md#8)", []),
    ],
)
def test_a_number_typed_into_the_readme_is_found(typed: str, found: list[str]) -> None:
    assert sorted(number for _, number in claims.without_record(typed, "README.md")) == sorted(found)


def test_a_number_typed_anywhere_into_the_readme_is_found() -> None:
    """After every line outside of code: in a table that a generator writes, the table differs from its records."""
    text = (ROOT / "README.md").read_text("utf-8")
    records = read_records(ROOT)
    code = [range(*(text.count("\n", 0, end) + 1 for end in m.span())) for m in re.finditer(r"```.*?```", text, re.S)]
    lines, visited = text.splitlines(keepends=True), 0
    for number in range(1, len(lines)):
        if any(number in block for block in code):
            continue
        planted = "".join([*lines[:number], "It is 3.37 times as fast.\n", *lines[number:]])
        document = claims.Document("README.md", planted, records)
        differs = document.as_it_should_be() != planted
        bare = list(claims.without_record(planted, "README.md"))
        inside_recipes = "<!-- recipes: start" in "".join(lines[:number]) and "recipes: end" in "".join(lines[number:])
        assert differs or bare == [(number + 1, "3.37")] or inside_recipes, (
            number
        )  # tests/project/test_recipes.py compares it
        visited += 1
    assert visited > 60


def test_what_is_exempt_in_the_readme_is_in_it() -> None:
    text = re.sub(r"\s+", " ", (ROOT / "README.md").read_text("utf-8"))
    assert [phrase for phrase in claims.NOT_MEASURED if phrase not in text] == []


def test_every_record_names_a_commit_and_sources_that_existed() -> None:
    """A source with a wrong name would never change, and its figures would look fresh for ever."""
    records = read_records(ROOT)
    assert len(records) > 30
    if git(ROOT, "rev-parse", "--is-shallow-repository") != "false\n":
        pytest.skip("a folder without the whole history does not know the commits")
    for name, found in records.items():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", found.date) and found.machine and found.command, name
        assert found.sources and changed_since(found, ROOT) is not None, f"{name}: git does not know {found.commit}"
        commit = found.commit.rstrip("+")
        then = [git(ROOT, "cat-file", "-e", f"{commit}:{source}") is not None for source in found.sources]
        now = [(ROOT / source).exists() for source in found.sources]
        assert any(then) and all(a or b for a, b in zip(then, now, strict=True)), name


# ---- a small repository of its own


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """One source, one record of it, and a README that shows two of its figures."""
    root = tmp_path / "project"
    (root / "docs").mkdir(parents=True)
    run(root, "init", "--quiet")
    (root / "engine.py").write_text("FAST = 1\n")
    commit(root)
    (root / "README.md").write_text(SENTENCE)
    write_record(root)
    assert claims.main(["--write"], root) == 0
    commit(root)
    return root


def run(root: Path, *words: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always"]
    return subprocess.run(["git", *who, *words], cwd=root, capture_output=True, text=True, check=True).stdout


def commit(root: Path) -> None:
    run(root, "add", "--all")
    run(root, "commit", "--quiet", "--message", "x")


def write_record(root: Path) -> None:
    record.record_if("", "speed", {"ratio": 2.5, "seconds": 65}, ["engine.py"], root=root)


def problems(root: Path) -> list[str]:
    return claims.problems_of(root, "README.md", read_records(root))


def test_a_change_of_a_source_makes_a_figure_stale_where_it_is_shown(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert problems(project) == [] and CHANGED not in (project / "README.md").read_text()
    claims.main([], project)
    assert "2 fresh, 0 stale" in capsys.readouterr().out

    (project / "other.py").write_text("")
    commit(project)
    assert problems(project) == [], "a commit that does not touch the sources asks for nothing"

    (project / "engine.py").write_text("FAST = 2\n")
    assert [claims.WRITE in problem for problem in problems(project)] == [True], "before the commit"
    commit(project)
    assert [claims.WRITE in problem for problem in problems(project)] == [True], "and after it"
    assert claims.main(["--write"], project) == 0
    commit(project)
    assert problems(project) == [] and CHANGED in (project / "README.md").read_text()
    capsys.readouterr()
    claims.main([], project)
    assert "0 fresh, 2 stale" in (out := capsys.readouterr().out) and "stale: 1 of its files changed" in out

    (project / "engine.py").write_text("FAST = 3\n")
    commit(project)
    assert problems(project) == [], "the second change asks for nothing"

    write_record(project)
    assert len(problems(project)) == 1, "measured again, so the remark has to go"
    assert claims.main(["--write"], project) == 0 and CHANGED not in (project / "README.md").read_text()


def test_a_figure_that_differs_from_its_record_is_found_and_written(project: Path) -> None:
    text = (project / "README.md").read_text()
    (project / "README.md").write_text(text.replace("2.50", "2.60"))
    assert problems(project) == [f"README.md:1: differs from the records; {claims.WRITE}"]
    assert claims.main(["--write"], project) == 0
    assert (project / "README.md").read_text() == text


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("speed.ratio", "pace.ratio", "there is no record pace"),
        ("speed.ratio", "speed.rat", "benchmarks/results/speed.json has no value rat"),
        ("2.50<!-- claim: speed.ratio -->", "2.50", "README.md:1: 2.50 comes from no record"),
        ("2.50<!--", "2.50 times<!--", "no figure right before <!-- claim: speed.ratio -->"),
        ("<!-- measured: start -->", "", "figures of speed have no line 'measured' after them"),
    ],
)
def test_a_figure_without_a_record_is_a_problem_and_not_an_empty_place(
    project: Path, old: str, new: str, problem: str
) -> None:
    file = project / "README.md"
    file.write_text(file.read_text().replace(old, new, 1))
    before = file.read_text()
    assert claims.main(["--write"], project) == 1
    assert any(problem in found for found in problems(project)) and "2.50" in before
    assert "2.50" in file.read_text()


def test_a_shallow_clone_accepts_the_remark_as_it_is(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for is_stale in (False, True):
        if is_stale:
            (project / "engine.py").write_text("FAST = 2\n")
            claims.main(["--write"], project)
            commit(project)
        clone = project.parent / f"clone-{is_stale}"
        run(project.parent, "clone", "--quiet", "--depth=1", project.as_uri(), str(clone))
        assert (CHANGED in (clone / "README.md").read_text()) == is_stale
        assert problems(clone) == []
        capsys.readouterr()
        claims.main([], clone)
        assert "0 fresh, 0 stale, 2 unknown commit" in capsys.readouterr().out


def test_a_measurement_of_uncommitted_sources_is_stale_from_the_start(project: Path) -> None:
    (project / "engine.py").write_text("FAST = 2\n")
    write_record(project)
    measured = read_records(project)["speed"]
    assert measured.commit.endswith("+") and changed_since(measured, project)
    commit(project)
    assert changed_since(measured, project)


def test_a_record_says_how_it_was_made(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    record.add_record_option(parser)
    assert parser.parse_args([]).record is None and parser.parse_args(["--record"]).record == ""
    record.record_if(None, "nothing", {}, ["engine.py"], root=project)
    assert "nothing" not in read_records(project)
    script = project / "benchmarks" / "speed.py"
    for words in ("--record 909c950 --steps 3", "--steps 3 --record", "--record=9 --steps 3"):
        monkeypatch.setattr(sys, "argv", [str(script), *words.split()])
        record.record_if("909c950", "speed", {"ratio": 1}, ["engine.py"], packages=["pytest"], root=project)
        found = json.loads((project / "benchmarks/results/speed.json").read_text())
        assert found["command"] == "python benchmarks/speed.py --steps 3" and found["commit"] == "909c950"
        assert set(found["versions"]) == {"pytest"} and found["machine"]
    with pytest.raises(AssertionError, match="do not exist"):
        record.record_if("", "speed", {}, ["engin.py"], root=project)


@pytest.mark.parametrize(
    ("sample", "value", "shown"),
    [
        ("1", 98541.4, "98,541"),
        ("0.1", 4, "4.0"),
        ("50 %", 0.914, "91 %"),
        ("5.0%", 0.114, "11.4%"),
        ("+1.0 %", 0.037, "+3.7 %"),
        ("-1.0 %", -0.082, "-8.2 %"),
        ("1e-5", 1.8e-5, "2e-5"),
        ("1.0e-5", 1.8e-5, "1.8e-5"),
        ("9:59", 354, "5:54"),
        ("9:59", 59.6, "1:00"),
    ],
)
def test_a_figure_keeps_its_form(sample: str, value: float, shown: str) -> None:
    assert claims.in_the_form_of(sample, value) == shown
    assert re.fullmatch(claims.FIGURE, shown)
