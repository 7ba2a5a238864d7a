"""Chat templates of strangers: limited wherever they run, found out after a few rows, and never a traceback."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import FAMILIES, chat_tokenizer, some_conversation
from dose import dose, log_progress, slow_case

import trillora
from trillora.data.open import data_options
from trillora.data.prepare import DataOptions, Source, prepare
from trillora.data.rendering.pool import MAX_AT_START, MAX_PAST_LIMIT, Worker
from trillora.data.rendering.render import RenderedRow, RenderSettings
from trillora.data.rendering.sandbox import names_needed
from trillora.data.rendering.worker import HARD_SECONDS_PER_ROW, PROMPT
from trillora.data.rows import BadRow, BadTemplate
from trillora.errors import TrilloraError
from trillora.generation.prompts import Prompts
from trillora.recipe.load import load_recipe

TOKENIZER = chat_tokenizer("chatml")
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
KILLS = "{{ ([[messages]] * 400000) | sum(start=[]) | length }}"  # one operation, which Python cannot interrupt
RECURSIVE = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"
HELLO = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}
# Processor time, since wall time depends on other processes: three rows at the hard limit, and starts of processes.
BOUND = MAX_AT_START * HARD_SECONDS_PER_ROW + 3.0


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def settings(template: str, **options: Any) -> RenderSettings:
    return RenderSettings(special_words=["<|im_end|>"], added_words=[], chat_template=template, **options)


# ---- prompts: generate, chat, eval, and samples during training


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ENDLESS, "more than 2 seconds"),
        ("{{ 'x' * 10 ** 10 }}", "more than 512 MB"),
        slow_case(KILLS, "killed the worker"),
    ],
    ids=["slow", "large", "kills"],
)
def test_a_template_past_its_limit_is_an_error_of_prompts(template: str, message: str) -> None:
    before = cpu_of_children()
    with pytest.raises(TrilloraError, match=message) as caught:
        Prompts(TOKENIZER, template=template)
    assert caught.value.where == "the chat template" and caught.value.do
    assert cpu_of_children() - before < HARD_SECONDS_PER_ROW + 2


def test_a_template_that_calls_itself_is_an_error_of_prompts() -> None:
    with pytest.raises(TrilloraError, match="calls itself endlessly"):
        Prompts(TOKENIZER, template=RECURSIVE).encode("hi")


def test_a_template_that_does_not_compile_is_an_error_of_prompts() -> None:
    with pytest.raises(TrilloraError, match="not a valid Jinja template"):
        Prompts(TOKENIZER, template="{% for %}")


@pytest.mark.parametrize(
    "prompt",
    ["half a pair \ud800", [{"role": "user", "content": b"bytes"}], [{}], ["text"], [{"role": "user"}], [None], []],
    ids=repr,
)
def test_a_prompt_that_is_no_conversation_is_an_error(prompt: Any) -> None:
    with pytest.raises(TrilloraError):
        Prompts(TOKENIZER, template=TOKENIZER.chat_template).encode(prompt)


def test_a_long_prompt_is_refused_before_it_is_sent_back() -> None:
    with pytest.raises(TrilloraError, match="characters; the limit is"):
        Prompts(TOKENIZER, template="{% if add_generation_prompt %}{{ 'x' * 70000000 }}{% endif %}").encode("hi")


def test_prompts_leave_no_process() -> None:
    prompts = Prompts(TOKENIZER, template=TOKENIZER.chat_template)
    process = prompts._workers[0]._process
    assert process is not None and process.poll() is None
    del prompts
    assert process.poll() is not None and not os.path.exists(f"/proc/{process.pid}")


def test_prompts_that_use_up_their_limits_do_not_stop_later_ones() -> None:
    """A server renders prompts for weeks, and each may use up its limit, also the first ones of a process."""
    large = "{% if messages[0]['content'] == 'large' %}{{ 'x' * 10 ** 10 }}{% endif %}"
    prompts, sizes = Prompts(TOKENIZER, template=large + TOKENIZER.chat_template), set()
    prompts.serve_strangers(3)
    for _ in range(3 * MAX_PAST_LIMIT):
        with pytest.raises(TrilloraError, match=r"more than 512 MB for one row\.\n"):
            prompts.encode("large")
        kept = [each for worker in prompts._workers for each in vars(worker).values()]
        sizes.add(sum(len(each) for each in kept if isinstance(each, bytes | list | dict | set)))
    workers = [prompts._idle.get() for _ in prompts._workers]
    for worker in workers:  # each of them still works, whichever was used
        prompts._idle.put(worker)
        assert prompts.encode("Hello") == Prompts(TOKENIZER, template=TOKENIZER.chat_template).encode("Hello")
    assert len(workers) == 3 and len(sizes) == 1
    prompts.close()


def test_templates_run_only_in_the_worker() -> None:
    """Only modules of the worker process use what runs a template."""
    source = Path(trillora.__file__).parent
    runs_one = re.compile(r"[ =](ChatTemplate|Renderer)\(|(?<!def )apply_chat_template|jinja2")
    found = {f.relative_to(source).as_posix() for f in source.rglob("*.py") if runs_one.search(f.read_text("utf-8"))}
    ours = "report/html.py"  # our own pages, from files of the package
    assert found == {ours, *(f"data/rendering/{name}.py" for name in ("render", "sandbox", "worker"))}
    assert "PackageLoader" in (source / ours).read_text("utf-8") and "from_string" not in (source / ours).read_text()


# ---- data: a bad template is found once, not once per row


def prepared(folder: Path, template: str, num_rows: int, **options: Any) -> Any:
    (folder / "a.jsonl").write_text((json.dumps(HELLO) + "\n") * num_rows)
    chosen = DataOptions(sources=(Source(str(folder / "a.jsonl")),), chat_template=template, **options)
    return prepare(chosen, TOKENIZER, folder / "cache", sequence_length=64, num_workers=1)


@pytest.mark.parametrize(
    ("template", "on_bad_row"),
    [slow_case(ENDLESS, "skip"), (KILLS, "refuse"), slow_case(ENDLESS, "refuse"), slow_case(KILLS, "skip")],
    ids=["slow, skip", "kills, refuse", "slow, refuse", "kills, skip"],
)
def test_an_endless_template_is_found_after_a_few_rows(tmp_path: Path, template: str, on_bad_row: str) -> None:
    before = cpu_of_children()
    with pytest.raises(TrilloraError, match="2 seconds") as caught:
        prepared(tmp_path, template, 256, on_bad_row=on_bad_row)
    used = cpu_of_children() - before
    if on_bad_row == "refuse":
        assert str(caught.value.where).endswith("a.jsonl:1")
        assert used < HARD_SECONDS_PER_ROW + 2
    else:
        assert "not tried" in caught.value.what and f"on {MAX_AT_START} rows" in caught.value.what
        assert used < BOUND


@pytest.mark.parametrize("grown", ["{{ range(99999) | batch(1) | list }}", "{{ 'x' * 400000 }}"], ids=["batch", "text"])
def test_a_template_that_makes_much_text_of_short_rows_is_found_after_a_few(tmp_path: Path, grown: str) -> None:
    """Each row is within the limits of time and memory, but all of them would be tokenized."""
    with pytest.raises(TrilloraError, match=r"characters of a row of \d+ bytes") as caught:
        prepared(tmp_path, grown + TOKENIZER.chat_template, 256, on_bad_row="skip")
    assert "not tried" in caught.value.what
    with pytest.raises(TrilloraError, match="characters of a row"):
        Prompts(TOKENIZER, template=grown + TOKENIZER.chat_template).encode("hi")


def test_a_template_may_write_long_instructions_and_repeat_a_row() -> None:
    for template, content in (("x" * 300_000, "hi"), ("{{ messages[0].content * 15 }}", "long " * 50_000)):
        chat = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "Hi"}]}
        worker = Worker(settings(template + TOKENIZER.chat_template))
        [row] = worker.render([json.dumps(chat).encode()], "messages")
        worker.close()
        assert not isinstance(row, BadRow) and len(row.text) > 300_000


def test_rows_past_their_limit_after_good_ones_are_bounded_too() -> None:
    """A template that is slow for some rows: they are skipped, up to a number."""
    slow = "{% if messages[0]['content'] == 'slow' %}{{ 'x' * 10 ** 10 }}{% endif %}" + TOKENIZER.chat_template
    worker = Worker(settings(slow))
    rows = [
        json.dumps({"messages": [{"role": "user", "content": text}, HELLO["messages"][1]]}).encode()
        for text in ["good", *["slow", "good"] * (MAX_PAST_LIMIT + 5)]
    ]
    outcomes = worker.render(rows, "messages")
    worker.close()
    assert len(outcomes) == len(rows)
    tried = 2 * MAX_PAST_LIMIT
    kinds = [isinstance(outcome, RenderedRow) for outcome in outcomes]
    assert kinds == [True, *[False, True] * (MAX_PAST_LIMIT - 1), False, *[False] * (len(rows) - tried)]
    assert all("not tried" in outcome.what for outcome in outcomes[tried:] if isinstance(outcome, BadRow))


# ---- limits of the machine, files of the recipe


def test_the_worker_stays_below_a_hard_limit_of_memory() -> None:
    """As under `ulimit -v` of a batch system."""
    hard = 300 << 20
    program = f"""
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({hard}, {hard}))
from trillora.data.rendering.pool import Worker
from trillora.data.rendering.render import RenderSettings
worker = Worker(RenderSettings(special_words=[], added_words=[], template={{"text": "{{{{ 'x' * n }}}}"}}))
for n in (3, 10**9):
    print(getattr(worker.render([json.dumps({{"n": n}}).encode()], "template")[0], "what", "rendered"))
worker.close()
"""
    path = os.pathsep.join([str(Path(trillora.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    small, large = done.stdout.splitlines() or [done.stderr, ""]
    assert small == "rendered" and "more than 512 MB" in large


@pytest.mark.parametrize("option", ["chat_template", "json_schema"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "null byte", "too large", "not UTF-8"])
def test_a_file_of_the_recipe_that_cannot_be_read_is_refused_at_once(tmp_path: Path, option: str, kind: str) -> None:
    path = tmp_path / "a.jinja"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "null byte":
            path = tmp_path / "a\0.jinja"
        case "too large":
            with path.open("wb") as file:
                file.truncate(1 << 30)
        case "not UTF-8":
            path.write_bytes(b"\xff")
    recipe = load_recipe(
        {"model": "m", "data": {"path": "a.jsonl", option: str(tmp_path / "x")}, "train": {"steps": 1}}
    )
    data = recipe.data.model_copy(update={option: str(path)})
    start = time.monotonic()
    with pytest.raises(TrilloraError) as caught:
        data_options(data, TOKENIZER)
    assert f"data.{option}" in str(caught.value)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("date", ["2024-13-45", "2024-02-30", "0000-01-01", "2024-1-1", "today"])
def test_a_date_that_does_not_exist_is_a_mistake_in_the_recipe(date: str) -> None:
    with pytest.raises(TrilloraError) as caught:
        load_recipe({"model": "m", "data": {"path": "a.jsonl", "template_date": date}, "train": {"steps": 1}})
    assert "data.template_date" in str(caught.value)


# ---- fuzzing

SNIPPETS = (
    ENDLESS, KILLS, RECURSIVE, "{{ 'x' * 10 ** 10 }}", "{{ [1] * 10 ** 9 }}", "{{ 9 ** 9 ** 9 }}", "{{ '%s' * 10**8 }}",
    "{% set n = namespace(s='x') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "{{ messages | map(attribute='x') | list | sum }}", "{{ messages[99]['content'] }}", "{{ 1 / 0 }}", "{{ none.x }}",
    "{{ raise_exception('\x1b]0;owned\x07') }}", "{{ raise_exception('\\ud800') }}", "\ud800", "\0", "\ufdd0\ufdd3",
    "{{ '\\ufdd2' ~ messages[0]['content'] ~ '\\ufdd3' }}", "{{ strftime_now('%' * 99999) }}", "{{ strftime_now(5) }}",
    "{{ messages.__class__.__mro__ }}", "{{ self }}", "{{ self._TemplateReference__context }}", "{{ caller() }}",
    "{% generation %}", "{% endgeneration %}", "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    "{% include 'x' %}", "{% import 'x' as y %}", "{% extends messages %}", "{% block a %}{{ self.a() }}{% endblock %}",
    "{% set messages = [] %}", "{% break %}", "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ '(' * 5000 }}", "{{ " + "(" * 500 + "1" + ")" * 500 + " }}", "{{ " + "-" * 5000 + "1 }}", "{{ '" + "{{" * 500,
    "{{ messages | tojson(indent=10**9) }}", "{{ 'x' | center(10**10) }}", "{{ range(10**10) | list }}",
    "{{ 'a' | replace('', 'b' * 10**7) }}", "{{ '{:>1000000000}'.format(1) }}", "{{ lipsum(n=10**6) }}",
    "{{ ('a' * 30) | wordwrap(1) | urlize }}", "{{ cycler }}{{ joiner }}{{ dict(a=1) }}", "{% raw %}", "{# ", "{%- -%}",
)  # fmt: skip


def mutated(rng: random.Random, template: str) -> str:
    """The template with a few changes: pieces removed, doubled, moved, or replaced by a hostile one."""
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(template) + 1)
        end = min(len(template), start + rng.choice((0, 1, 3, 20, 200)))
        piece = rng.choice(("", template[start:end] * 2, rng.choice(SNIPPETS), rng.choice("{}%#-'\"()[]| \n")))
        template = template[:start] + piece + template[end:]
    return template


def test_fuzzed_templates_end_in_text_or_an_error_within_their_limits() -> None:
    rng = random.Random(20261116)
    num_rendered = num_refused = 0
    for number in range(dose(18, 4000)):
        name = rng.choice(list(FAMILIES))
        family = FAMILIES[name]
        template = rng.choice(SNIPPETS) if rng.random() < 0.1 else mutated(rng, family.template)
        options = RenderSettings(
            special_words=list(family.specials), added_words=["<think>"], chat_template=template,
            chat_words={"bos_token": family.bos or "", "eos_token": family.stop},
        )  # fmt: skip
        rows = [json.dumps(some_conversation(rng, family)).encode() for _ in range(4)]
        worker = Worker(options)
        before = cpu_of_children()
        try:
            outcomes = [*worker.render(rows, "messages"), *worker.render(rows, PROMPT)]
            assert len(outcomes) == 8
            num_rendered += sum(isinstance(outcome, RenderedRow) for outcome in outcomes)
            for bad in (outcome for outcome in outcomes if isinstance(outcome, BadRow)):
                assert bad.what and bad.do and "Traceback" not in bad.what, (template, bad.what)
                num_refused += 1
        except TrilloraError as error:
            num_refused += 1
            assert error.do and "Traceback" not in error.what, (template, error.what)
        finally:
            worker.close()
        used = cpu_of_children() - before
        # Every row within its hard limit, and the start of a process after each that was killed.
        assert used < 8 * (HARD_SECONDS_PER_ROW + 1.0), (number, template, used)
        if number % 100 == 99:
            log_progress(f"templates: {number + 1}, {num_rendered} rows rendered, {num_refused} refused")
    assert num_rendered and num_refused


@pytest.mark.parametrize(
    ("source", "keys"),
    [
        ("{{ question }} {{ answer | trim }}{{ row.other }}", {"question", "answer"}),
        ("{% set a = 1 %}{{ a }}{{ b[0].c }}{{ range(3) }}", {"b"}),
        ("{% if kind %}{{ x }}{% endif %}{% for each in turns %}{{ each }}{% endfor %}", set()),
        ("{{ a or b }}{{ c if d else e }}{{ f | default('') }}{{ g is defined }}", set()),
        ("{% macro say(text) %}{{ text }}{% endmacro %}{{ say(words) }}", {"words"}),
        ("{{ ('a' * 10 ** 10) * 10 ** 10 }}{{ x }}", {"x"}),  # parsed only: nothing is computed
        ("(" * 5000, set()),
        ("{{ " + "(" * 5000 + "x", None),
    ],
)
def test_the_keys_that_a_template_needs_are_known_without_running_it(source: str, keys: set[str] | None) -> None:
    if keys is None:
        with contextlib.suppress(BadTemplate):  # or too deep for the parser: left to the process with limits
            assert names_needed(source, "data.template.user") == set()
    else:
        assert names_needed(source, "data.template.user") == keys
