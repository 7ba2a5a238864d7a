"""A hook of mkdocs: documents outside docs/ become pages of the site, and GitHub's Markdown is read as GitHub reads it.

Links in docs/ are written for GitHub, relative to the file. On the site,

    ../benchmarks/RESULTS.md       leads to the page project/results.md
    ../recipes/sys-scan.yaml       leads to a copy of the file, files/recipes/sys-scan.yaml
    ../recipes                     a folder: leads to docs/recipes.md if there is one, else only its name remains

A link to a file that does not exist is left as it is, and mkdocs reports it. `<!-- README: Recipes -->` in a page
becomes that section of README.md.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
# Documents outside docs/, and their pages.
PAGES = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "CHANGELOG.md": "project/changelog.md",
    "benchmarks/RESULTS.md": "project/results.md",
    "benchmarks/PREFLIGHT.md": "project/preflight.md",
    "dev/LOG.md": "project/log.md",
    "dev/DEFECTS.md": "project/defects.md",
    "dev/SOAK.md": "project/soak.md",
    "README.md": "index.md",
}
SOURCES = {page: document for document, page in PAGES.items() if page != "index.md"}
FENCE = re.compile(r"^ *(```|~~~)")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
INCLUDED = re.compile(r"^<!-- README: (.+) -->$", flags=re.M)
LIST_ITEM = re.compile(r"(?:[-*] |\d+\. )")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the documents outside docs/, and the files that any page links to."""
    from mkdocs.structure.files import File

    for page, document in SOURCES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / document)))
    for target in sorted(linked_files(Path(config["docs_dir"]))):
        files.append(File.generated(config, f"files/{target}", abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A page as the site needs it."""
    return for_site(with_sections(markdown), page.file.src_uri)


def with_sections(markdown: str) -> str:
    """The Markdown of a page in docs/ with the sections of README.md that it names, their links relative to docs/."""

    def section(named: re.Match[str]) -> str:
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        found = re.search(rf"^## {re.escape(named[1])}\n.*?(?=^## |\Z)", readme, flags=re.M | re.S)
        assert found, f"README.md has no section {named[1]}"
        return LINK.sub(lambda link: link[0] if "://" in link[3] else f"{link[1]}[{link[2]}](../{link[3]})", found[0])

    return INCLUDED.sub(section, markdown)


def for_site(markdown: str, page: str) -> str:
    """The Markdown of a page, with links of the site, and with the empty line that mkdocs needs before a list."""
    lines: list[str] = []
    for line, is_code in _lines(markdown):
        if not is_code:
            line = LINK.sub(lambda link: _on_site(link, page), line)
            before = lines[-1] if lines else ""
            if LIST_ITEM.match(line) and before.strip() and not LIST_ITEM.match(before) and not before.startswith(" "):
                lines.append("")
        lines.append(line)
    return "\n".join(lines)


def linked_files(docs: Path) -> set[str]:
    """Files outside docs/ that a page links to, by their paths in the repository."""
    texts = {path.relative_to(docs).as_posix(): path for path in docs.rglob("*.md")}
    texts |= {page: ROOT / document for page, document in SOURCES.items()}
    found = set()
    for page, path in texts.items():
        for line, is_code in _lines(with_sections(path.read_text(encoding="utf-8"))):
            targets = [] if is_code else [_target(link[3], page) for link in LINK.finditer(line)]
            found |= {target for target in targets if target and (_place(target) or "").startswith("files/")}
    return {target for target in found if (ROOT / target).is_file()}


def _lines(markdown: str) -> Iterator[tuple[str, bool]]:
    """The lines, and whether each belongs to a block of code."""
    in_code = False
    for line in markdown.split("\n"):
        is_fence = FENCE.match(line) is not None
        yield line, in_code or is_fence
        in_code ^= is_fence


def _target(url: str, page: str) -> str | None:
    """What a link of a page leads to, as a path in the repository. None: another server, or the same page."""
    address = url.partition("#")[0]
    if not address or re.match(r"[a-z][a-z0-9+.-]*:|/", address):
        return None
    source = SOURCES.get(page, f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), address))


def _on_site(link: re.Match[str], page: str) -> str:
    image, text, url = link.groups()
    target = _target(url, page)
    if target is None or target.startswith("..") or not (ROOT / target).exists():
        return link[0]
    place = _place(target)
    if place is None:
        return text
    anchor = url[len(url.partition("#")[0]) :]
    return f"{image}[{text}]({posixpath.relpath(place, posixpath.dirname(page) or '.')}{anchor})"


def _place(target: str) -> str | None:
    """The place on the site of a file or folder of the repository; None for a folder without a page."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if target in PAGES:
        return PAGES[target]
    if (ROOT / target).is_dir():
        return f"{target}.md" if (ROOT / "docs" / f"{target}.md").is_file() else None
    return f"files/{target}"
