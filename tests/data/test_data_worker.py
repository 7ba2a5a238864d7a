"""Untrusted rows and templates: the worker limits them to two seconds and half a gigabyte, and has no secrets."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from dose import slow_case

from trillora.data.rendering.pool import Batch, Pool, Worker
from trillora.data.rendering.render import RenderedRow, RenderSettings
from trillora.data.rendering.worker import BYTES_ABOVE_START, HARD_SECONDS_PER_ROW
from trillora.data.rows import BadRow, RawRow
from trillora.errors import TrilloraError

PLAIN = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<end>' }}{% endfor %}"
HELLO = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}


def settings(**options: Any) -> RenderSettings:
    return RenderSettings(**{"special_words": ["<end>"], "added_words": [], "train_on": "everything"} | options)


def row(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.fixture
def hostile(request: pytest.FixtureRequest) -> Iterator[Worker]:
    worker = Worker(settings(template={"text": request.param}))
    yield worker
    worker.close()


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "an endless loop": (LOOP, "more than 2 seconds"),
    "a loop that writes": (LOOP.replace("{% endfor %}", "x{% endfor %}", 1), "more than 2 seconds|more than 512 MB"),
    "a huge power": ("{{ n ** (n ** n) }}", "more than 2 seconds"),
    "a string of ten gigabytes": ("{{ 'x' * 10 ** 10 }}", "more than 512 MB"),
    "a padded gigabyte": ("{{ '%1000000000d' % 1 }}", "more than 512 MB"),
    "a centred gigabyte": ("{{ 'x' | center(2000000000) }}", "more than 512 MB"),
    "a doubling string": (
        "{% set n = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
        "more than 512 MB",
    ),
    "a text of hundreds of megabytes": (
        "{{ 'x' * (n * 10000000) }}",
        "renders to 90,000,000 characters|more than 512 MB",
    ),
    "a macro that calls itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "calls itself endlessly"),
    "the class of a string": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot be rendered"),
    "the globals of a function": ("{{ lipsum.__globals__['os'].environ }}", "cannot be rendered"),
    "a format string's attributes": ("{{ '{0.__class__}'.format(row) }}", "cannot be rendered"),
    "a changed row": ("{{ row.update({'a': 1}) }}", "cannot be rendered"),
    "an include": ("{% include '/etc/passwd' %}", "cannot be rendered"),
    "a name that the row lacks": ("{{ nothing_here }}", "'nothing_here' is undefined"),
}


# They end like the endless loop, and like the row that kills its worker.
RARE = ("a loop that writes", "a huge power")


@pytest.mark.parametrize(
    ("hostile", "message"),
    [slow_case(*case) if name in RARE else case for name, case in HOSTILE.items()],
    ids=HOSTILE,
    indirect=["hostile"],
)
def test_hostile_template_becomes_a_bad_row_in_bounded_time_and_memory(hostile: Worker, message: str) -> None:
    hostile.start()
    assert hostile._process is not None
    limit, _ = resource.prlimit(hostile._process.pid, resource.RLIMIT_AS)
    assert BYTES_ABOVE_START < limit < BYTES_ABOVE_START + 2**30  # what the interpreter maps before the first row
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    outcome = hostile.render([row({"n": 9})], "template")[0]
    hostile.close()
    assert isinstance(outcome, BadRow)
    assert re.search(message, outcome.what), outcome.what
    assert outcome.do
    # Processor time, since wall time depends on other processes.
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert used < 2 * HARD_SECONDS_PER_ROW


def test_row_that_kills_its_worker_is_the_only_one_lost() -> None:
    kills = "{{ ([[n]] * 400000) | sum(start=[]) | length }}"  # one operation, which Python cannot interrupt
    worker = Worker(settings(template={"text": "{% if n == 9 %}" + kills + "{% else %}row {{ n }}{% endif %}"}))
    outcomes = worker.render([row({"n": n}) for n in (0, 1, 2, 9, 4, 5)], "template")
    worker.close()
    assert [o.text if isinstance(o, RenderedRow) else "bad" for o in outcomes] == [
        "row 0", "row 1", "row 2", "bad", "row 4", "row 5"
    ]  # fmt: skip


def test_pool_keeps_the_order_of_rows() -> None:
    rows = [[RawRow("", n * 10 + k, row({"text": f"{n} {k}"})) for k in range(10)] for n in range(30)]
    with Pool(settings(), num_workers=3) as pool:
        answers = list(pool.map(Batch(0, "text", part) for part in rows))
    assert [batch.rows for batch, _ in answers] == rows
    texts = [o.text for _, outcomes in answers for o in outcomes if isinstance(o, RenderedRow)]
    assert texts == [f"{n} {k}" for n in range(30) for k in range(10)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"template": {"text": "first\n{{ a"}},
            "data.template.text is not a valid Jinja template: unexpected end of template, expected '}}'.\n"
            "  where: data.template.text\n  do:    correct line 2 of the template: {{ a",
        ),
        ({"chat_template": "{% for %}"}, "The chat template is not a valid Jinja template"),
        ({"template": {"text": "{{ 9 ** (9 ** 9) }}"}}, "more than 2 seconds|did not start"),  # folded by the compiler
        ({"schema": {"type": 5}}, "schema"),
    ],
)
def test_template_that_does_not_compile_is_an_error_before_any_row(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TrilloraError, match=message), Pool(settings(**options), num_workers=1):
        pass


def test_worker_has_no_secret_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    worker = Worker(settings())
    worker.start()
    assert worker._process is not None
    with open(f"/proc/{worker._process.pid}/environ", "rb") as file:
        assert b"hf_canary" not in file.read()
    worker.close()


def test_worker_starts_without_large_libraries() -> None:
    """A run starts several; with pydantic each takes twice as long to start."""
    code = "import sys, trillora.data.rendering.worker; print(*sorted({n.partition('.')[0] for n in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "jinja2" in loaded
    assert not loaded & {"pydantic", "numpy", "jax", "torch", "transformers", "tokenizers", "rich", "typer"}


def test_an_error_while_rows_are_rendered_leaves_no_worker() -> None:
    rows = [RawRow("", number, row({"text": "word " * 200})) for number in range(256)]
    for _ in range(5):
        with pytest.raises(ZeroDivisionError), Pool(settings(), num_workers=1) as pool:
            for _ in pool.map(Batch(0, "text", rows) for _ in range(6)):
                raise ZeroDivisionError
        (thread,) = pool._threads._threads
        assert not thread.is_alive() and pool._workers[0]._process is None


def test_a_closed_pool_leaves_no_worker() -> None:
    with Pool(settings(chat_template=PLAIN), num_workers=2) as pool:
        assert isinstance(pool.render([row(HELLO)], "messages")[0], RenderedRow)
        processes = [worker._process for worker in pool._workers if worker._process is not None]
        assert processes
    assert all(process.poll() is not None for process in processes)
    assert not any(os.path.exists(f"/proc/{process.pid}") for process in processes)
