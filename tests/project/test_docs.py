"""The documentation: the site builds without a warning, needs no other server, and its links work on GitHub too."""

from __future__ import annotations

import html.parser
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import api_reference
import command_reference
import pytest
import recipe_reference
import yaml
from docs_site import LINK, PAGES, ROOT, SOURCES, for_site, with_sections
from generated import part_of

import trillora
from trillora.model.loading.embedded import INSTALL
from trillora.recipe.problems import ELSEWHERE

# What mkdocs prints if all is well. (--quiet would silence warnings for --strict too.)
USUAL = re.compile(r"INFO +- +(Cleaning site directory|Building documentation to|Documentation built in)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it. Anything that mkdocs says is a fault."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    said = [line for line in (built.stdout + built.stderr).splitlines() if not USUAL.match(line)]
    assert (built.returncode, said) == (0, [])
    return folder


def test_scripts_that_the_documents_name_exist() -> None:
    """`peers.py` may be anywhere in the repository; a name with a folder must be at that place. A name after a commit,
    as `git show` reads it, is of a script that was deleted."""
    names = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md")
    documents = [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in names)]
    folders = (ROOT / name for name in ("benchmarks", "src", "tests", "tools"))
    scripts = [path.as_posix() for folder in folders for path in folder.rglob("*.py")]
    named = {
        (document.name, script)
        for document in documents
        for script in re.findall(r"(?<![\w*…/:-])[\w/-]+\.py\b", document.read_text("utf-8"))
    }
    assert len(named) > 80, len(named)
    missing = sorted(pair for pair in named if not any(path.endswith("/" + pair[1]) for path in scripts))
    assert not missing, missing


def test_the_extras_that_the_documents_name_exist() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    lines = [line for document in documents for line in document.read_text("utf-8").splitlines()]
    named = {extra for line in lines for extra in re.findall(r"(?<![\w`])\.\[([a-z][\w-]*)\]", line)}
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert {"cuda", "tpu", "data"} < named <= set(declared)
    assert INSTALL in "\n".join(lines)  # the embedded model, which is none of them


class Loads(html.parser.HTMLParser):
    """What a browser loads for a page by itself, in contrast to what a reader may click."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        loads = tag in ("script", "img", "iframe", "source") or (tag == "link" and values.get("rel") != "canonical")
        self.urls += [values[key] or "" for key in ("src", "href") if loads and key in values]


def test_every_page_is_on_the_site_and_loads_nothing_from_other_servers(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    documents = {*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in SOURCES.values())}
    assert len(pages) >= len(documents) > 20
    num_urls = 0
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        num_urls += len(loads.urls)
        assert [url for url in loads.urls if re.match(r"(https?:)?//", url)] == [], page
    assert num_urls > 5 * len(pages)
    styles = list(site.rglob("*.css"))
    assert styles and all("url(http" not in style.read_text(encoding="utf-8") for style in styles)


def test_the_navigation_lists_every_page_once() -> None:
    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages(part)]  # type: ignore[attr-defined]

    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    written = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted([*written, *SOURCES])


@pytest.mark.parametrize("document", ["README.md", *SOURCES.values()])
def test_links_of_documents_outside_docs_lead_to_files(document: str) -> None:
    """mkdocs checks the pages in docs/; these are read on GitHub."""
    text = re.sub(r"^ *```.*?^ *```", "", (ROOT / document).read_text(encoding="utf-8"), flags=re.M | re.S)
    links = [link[3].partition("#")[0] for link in LINK.finditer(text)]
    local = [link for link in links if link and "://" not in link]
    assert [link for link in local if not ((ROOT / document).parent / link).exists()] == []


def test_links_for_github_become_links_of_the_site() -> None:
    cases = {
        "[a](../benchmarks/RESULTS.md#b)": "[a](project/results.md#b)",
        "[a](../Makefile)": "[a](files/Makefile)",
        "[`a`](../tests)": "`a`",
        "[a](runs.md)": "[a](runs.md)",
        "[a](../no-such-file)": "[a](../no-such-file)",
        "[a](https://example.org)": "[a](https://example.org)",
    }
    assert {text: for_site(text, "data.md") for text in cases} == cases
    assert for_site("[a](docs/runs.md) [b](README.md)", "project/architecture.md") == "[a](../runs.md) [b](../index.md)"
    assert for_site("```\n[a](../Makefile)\n- b\n```", "data.md") == "```\n[a](../Makefile)\n- b\n```"
    assert set(PAGES.values()) >= set(SOURCES)


def test_a_page_can_have_a_section_of_the_readme() -> None:
    section = for_site(with_sections("a\n\n<!-- README: Recipes -->\n\nb"), "index.md")
    assert section.startswith("a\n\n## Recipes\n") and section.endswith("\n\nb")
    assert "(files/recipes/sys-scan-mistral-7b.yaml)" in section and "(recipes.md)" in section


def test_a_list_after_a_paragraph_is_a_list() -> None:
    """As on GitHub; mkdocs alone would make one paragraph of it."""
    assert for_site("These:\n- one,\n  and more\n- two", "data.md") == "These:\n\n- one,\n  and more\n- two"


def test_the_recipe_reference_has_every_option_of_the_schema() -> None:
    schema = recipe_reference.read_schema()
    part = recipe_reference.page_part(schema)
    assert part == part_of(recipe_reference.DOCUMENT, recipe_reference.PART), "run tools/recipe_reference.py"
    rows = [line for line in part.splitlines() if line.startswith(("| `", "| [`"))]
    assert len(rows) == recipe_reference.num_options(schema) > 100


def test_the_page_of_commands_has_every_option_of_every_command() -> None:
    part = command_reference.page_part()
    written = part_of(command_reference.DOCUMENT, command_reference.PART)
    assert part == written, "run tools/command_reference.py"
    found = [command_reference.options(command, context) for _, command, context in command_reference.commands()]
    rows = [line for line in part.splitlines() if line.startswith("| `")]
    assert len(rows) == sum(map(len, found)) > 100 and len(found) >= 20


def test_the_python_reference_has_every_public_name() -> None:
    part = api_reference.page_part()
    assert part == part_of(api_reference.DOCUMENT, api_reference.PART), "run tools/api_reference.py"
    functions = {name for name in trillora.__all__ if callable(getattr(trillora, name)) and name[0].islower()}
    assert functions <= set(re.findall("^### (.*)", part, flags=re.M)) and len(functions) == 5


def test_the_page_of_terms_has_every_name_that_recipes_suggest_a_better_one_for() -> None:
    page = (ROOT / "docs" / "terms.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| ")]
    for theirs, ours in ELSEWHERE.items():
        assert any(re.search(rf"`{theirs}\b", there) and f"`{ours}" in here for there, here in rows), theirs
    assert len(ELSEWHERE) > 25
