"""The data of the quickstart: valid, split without overlap, and with the documented majority baseline."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = files("trillora.quickstart") / "data"
NUM_ROWS = {"train": 1285, "validation": 64, "test": 128}
VALUES = {
    "provider": "alibabacloud aws azure cloudflare gcp googleworkspace kubernetes m365 okta openstack oraclecloud",
    "area": "ai application collaboration compute container database governance identity monitoring network security "
    "storage",
    "severity": "critical high low medium",
}
# Fraction of the test rows for which the most common value of the training rows is right.
MAJORITY = {"provider": ("aws", 66 / 128), "area": ("identity", 24 / 128), "severity": ("medium", 73 / 128)}


def rows(name: str) -> list[list[dict[str, str]]]:
    lines = (FOLDER / f"{name}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def verdicts(name: str) -> list[dict[str, str]]:
    return [json.loads(answer["content"]) for _, answer in rows(name)]


def titles(name: str) -> list[str]:
    found = [re.match(r"Failed check: (.+)\nService: ", question["content"]) for question, _ in rows(name)]
    assert all(found)
    return [match[1] for match in found if match]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "tools" / "quickstart_data.py"
    spec = importlib.util.spec_from_file_location("quickstart_data_tool", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NUM_ROWS)
def test_rows_are_a_question_and_an_answer(name: str) -> None:
    assert len(rows(name)) == NUM_ROWS[name]
    for chat in rows(name):
        assert [message["role"] for message in chat] == ["user", "assistant"]
        assert all(set(message) == {"role", "content"} for message in chat)


@pytest.mark.parametrize("name", NUM_ROWS)
def test_every_answer_has_exactly_the_fields_with_known_values(name: str) -> None:
    for verdict in verdicts(name):
        assert list(verdict) == list(VALUES)
        for field, value in verdict.items():
            assert value in VALUES[field].split()


def test_every_value_occurs_in_training() -> None:
    for field, values in VALUES.items():
        assert {verdict[field] for verdict in verdicts("train")} == set(values.split())


@pytest.mark.parametrize(("one", "other"), [("train", "test"), ("train", "validation"), ("validation", "test")])
def test_no_title_is_similar_to_one_in_another_file(one: str, other: str, tool: ModuleType) -> None:
    mine, others = ([frozenset(re.findall(r"[a-z0-9]+", t.lower())) for t in titles(name)] for name in (one, other))
    nearest = max(len(a & b) / len(a | b) for a in mine for b in others)
    assert nearest < tool.SAME_WORDS


def test_the_majority_guess_is_as_documented() -> None:
    for field, (value, share) in MAJORITY.items():
        assert Counter(verdict[field] for verdict in verdicts("train")).most_common(1)[0][0] == value
        assert sum(verdict[field] == value for verdict in verdicts("test")) / NUM_ROWS["test"] == share


def test_licence_and_notice_are_included() -> None:
    licence, notice = ((FOLDER / name).read_text("utf-8") for name in ("LICENSE", "NOTICE"))
    assert "Apache License" in licence and "Version 2.0" in licence and "Toni de la Fuente" in licence
    assert all(word in notice for word in ("prowler 5.46.0", "Toni de la Fuente", "Apache License", "Changed:"))


def test_the_files_are_small() -> None:
    assert sum(len(file.read_bytes()) for file in FOLDER.iterdir() if file.is_file()) < 600_000


def check(provider: str, name: str, title: str, **other: Any) -> dict[str, Any]:
    fields = {"ServiceName": "s3", "ResourceType": "AwsS3Bucket", "Severity": "high", "ResourceGroup": "storage"}
    return {"Provider": provider, "CheckID": name, "CheckTitle": title, **fields, **other}


def test_similar_checks_form_one_family(tool: ModuleType) -> None:
    checks = [
        check("aws", "bucket_a", "Bucket is not public to anyone on the internet"),
        check("gcp", "bucket_b", "Bucket is not public to anybody on the internet"),
        check("aws", "root_mfa", "Root has a second factor"),
        check("azure", "root_mfa", "The owner logs in twice"),
        check("aws", "bucket_c", "Bucket writes a log"),
    ]
    first, second, third, fourth, fifth = tool.families(checks)
    assert first == second and third == fourth
    assert len({first, third, fifth}) == 3


def test_a_check_without_a_group_gets_the_area_of_its_service(tool: ModuleType) -> None:
    assert tool.area(check("gcp", "a", "A", ResourceGroup=None, ServiceName="cloudsql")) == "database"
    assert tool.area(check("gcp", "a", "A", ResourceGroup=None, ServiceName="compute")) is None
    assert tool.area(check("gcp", "a", "A", ResourceGroup="ai_ml")) == "ai"


def test_a_row_shows_the_finding_and_not_the_verdict(tool: ModuleType) -> None:
    question, answer = tool.as_row(check("aws", "a", "Bucket\n is  private"))["messages"]
    assert question["content"].startswith("Failed check: Bucket is private\nService: s3, resource: AwsS3Bucket\n")
    assert json.loads(answer["content"]) == {"provider": "aws", "area": "storage", "severity": "high"}
    assert "high" not in question["content"]
