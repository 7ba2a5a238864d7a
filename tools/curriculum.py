"""A two-stage curriculum on real text: the embedded model trains on Romanian text, then on questions and answers in it.

    python tools/curriculum.py                 # download, train on the CPU, print losses and sample answers
    python tools/curriculum.py --prepare-only  # only write the data files for recipes/real/curriculum.yaml

The text is Debian's package of Romanian manual pages (GPL-3+); it is downloaded and not part of this repository. Stage
one trains on the pages as raw text. Stage two trains on chats that ask what an option of a command does. Needs
`apt-get` and `dpkg-deb`: Debian, Ubuntu, Colab or Kaggle.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "real" / "curriculum.yaml"
PACKAGE = "manpages-ro"
NUM_QUESTIONS = 16  # held-out questions for base and adapter
# Sections with the same text in many pages: they would be both in the training and in the held-out data.
SAME_EVERYWHERE = ("COPYRIGHT", "DREPTURI", "RAPORTAREA", "TRADUCERE", "CONSULTAȚI")
MIN_ANSWER, MAX_ANSWER = 15, 240  # characters


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=default_folder(), help="folder for the data files")
    parser.add_argument("--out", type=Path, default=Path("runs/curriculum"), help="the run's folder")
    parser.add_argument("--prepare-only", action="store_true", help="write the data files and stop")
    arguments = parser.parse_args()
    text, chats, held_out = prepare(arguments.folder)
    if arguments.prepare_only:
        return 0
    started = time.monotonic()
    overrides = [f"stages.0.data.path={text}", f"stages.1.data.path={chats}", f"stages.1.data.validation={held_out}"]
    command = [sys.executable, "-m", "trillora", "train", str(RECIPE), *overrides, "--out", str(arguments.out)]
    code = subprocess.run(command, check=False).returncode
    if code:
        return code
    print(f"\nTrained in {(time.monotonic() - started) / 60:.1f} minutes.")
    return show_losses(arguments.out) | show_answers(arguments.out, held_out)


def default_folder() -> Path:
    return Path(os.environ.get("TRILLORA_CACHE") or Path.home() / ".cache" / "trillora") / "curriculum"


def prepare(folder: Path) -> tuple[Path, Path, Path]:
    """Writes raw text, chats to train on, and held-out chats (every tenth question)."""
    pages = list(manual_pages(folder))
    text, chats, held_out = (folder / name for name in ("text.jsonl", "chats.jsonl", "held-out.jsonl"))
    sections = [s.strip() for _, page in pages for s in re.split(r"\n(?=[A-ZĂÂÎȘȚ ]{4,}\n)", plain(page))]
    sections = [s for s in dict.fromkeys(sections) if len(s) > 200 and not s.startswith(SAME_EVERYWHERE)]
    write_rows(text, [{"text": section} for section in sections])
    questions = list(dict.fromkeys(pair for name, page in pages for pair in options(name, page)))
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in questions
    ]
    write_rows(chats, [row for number, row in enumerate(rows) if number % 10])
    write_rows(held_out, rows[::10])
    print(f"{len(pages)} manual pages: {len(sections)} sections of text, {len(rows)} questions, in {folder}")
    return text, chats, held_out


def write_rows(file: Path, rows: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def manual_pages(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and roff source of every page of the package."""
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob(f"{PACKAGE}_*.deb")):
        subprocess.run(["apt-get", "--quiet", "--quiet", "download", PACKAGE], cwd=folder, check=True)
    (archive,) = folder.glob(f"{PACKAGE}_*.deb")
    subprocess.run(["dpkg-deb", "-x", archive.name, "pages"], cwd=folder, check=True)
    for file in sorted((folder / "pages").rglob("man/ro/man*/*.gz")):
        source = gzip.decompress(file.read_bytes()).decode("utf-8", "replace")
        if not source.startswith(".so "):  # an alias of another page
            yield file.name.split(".")[0], source


def plain(roff: str) -> str:
    """The text of a page without macros and font changes; headings are on separate lines."""
    lines = []
    for line in roff.splitlines():
        if line.startswith(('.\\"', "'\\\"", ".TH", ".nh", ".ad", ".if", ".ie", ".el", ".de", ".ds", ".nr", "..")):
            continue
        if heading := re.match(r"\.(SH|SS)\s+(.*)", line):
            lines += ["", heading[2].strip('"').upper()]
        elif macro := re.match(r"\.[A-Z]{1,2}\s+(.*)", line):
            lines.append(macro[1].replace('"', ""))
        elif not line.startswith((".", "'")):
            lines.append(line)
    return unescape("\n".join(lines))


def unescape(text: str) -> str:
    text = re.sub(r"\\f[A-Z]|\\f\(..|\\[,/&|^:%]|\\s[-+]?\d", "", text)
    named = {"\\-": "-", "\\(bu": "•", "\\(aq": "'", "\\(dq": '"', "\\e": "\\", "\\ ": " ", "\\~": " ", "\\(co": "©"}
    for escape, character in named.items():
        text = text.replace(escape, character)
    return re.sub(r"\\\(..|\\\[[^\]]*\]|\\\*\S", "", text)


def options(name: str, roff: str) -> Iterator[tuple[str, str]]:
    """Pairs of question and answer about the options of a command."""
    for item in re.split(r"^\.TP.*$", roff, flags=re.MULTILINE)[1:]:
        tag, _, rest = item.strip().partition("\n")
        option = " ".join(plain(tag).split())
        body = re.split(r"^\.(?:SH|SS|PP|TP|RS|RE|IP)", rest, maxsplit=1, flags=re.MULTILINE)[0]
        answer = " ".join(plain(body).split())
        if option.startswith("-") and len(option) < 60 and MIN_ANSWER <= len(answer) <= MAX_ANSWER:
            yield f"Ce face opțiunea {option} a comenzii {name}?", f"Opțiunea {option}: {answer.rstrip('.')}."


def show_losses(run: Path) -> int:
    """Prints the held-out loss before and after each stage. Returns 0 if both decreased."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    good = True
    print(f"\n{'held-out rows of':<18}{'before':>9}{'after':>9}   perplexity")
    for stage in ("text", "chat"):
        found = [line for line in lines if line["kind"] == "evaluation" and line["stage"] == stage]
        first, last = found[0], found[-1]
        print(
            f"{f'stage {stage}':<18}{first['loss']:>9.3f}{last['loss']:>9.3f}   "
            f"{first['perplexity']:.1f} -> {last['perplexity']:.1f}"
        )
        good = good and last["loss"] < first["loss"]
    return 0 if good else 1


def show_answers(run: Path, held_out: Path) -> int:
    """Prints how many held-out questions are answered in the style of the chats, and how many answers end.

    Returns 0 if the adapter uses the style more often than the base, and in more than half of its answers.
    """
    from trillora.generation.generator import Generator

    rows = [json.loads(line)["messages"] for line in held_out.read_text("utf-8").splitlines()][:NUM_QUESTIONS]
    questions = [row[0]["content"] for row in rows]
    generator = Generator.open(str(run), backend="cpu")
    shares = {}
    for name, adapted in (("base", False), ("adapter", True)):
        answers = generator.generate(questions, max_tokens=64, adapted=adapted)
        in_form = sum(answer.text.startswith("Opțiunea -") for answer in answers)
        shares[name] = in_form
        ended = sum(answer.stopped for answer in answers)
        print(f"{name:<10} {in_form} of {len(answers)} answers in the style of the chats, {ended} not cut off")
        print(f"           {questions[0]}\n           {answers[0].text[:160]!r}")
    return 0 if shares["adapter"] > max(shares["base"], len(questions) // 2) else 1


if __name__ == "__main__":
    sys.exit(main())
