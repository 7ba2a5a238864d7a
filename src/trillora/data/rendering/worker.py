"""The worker process that parses rows and runs templates. Both are untrusted, so it limits time and memory.

It reads frames from standard input, first the settings, then batches of rows, and answers each on standard output. A
row may use two seconds of processor time and half a gigabyte; above that it becomes a bad row. If Python cannot
interrupt it, the kernel ends the process, and the parent finds the row that caused it (`pool`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from trillora.child_process import read_frame, write_frame
from trillora.data.rendering.render import MAX_CHARACTERS, Cut, RenderedRow, Renderer, RenderSettings, parse
from trillora.data.rows import BadRow, BadTemplate, Chat
from trillora.errors import TrilloraError

SECONDS_PER_ROW = 2.0  # of processor time
HARD_SECONDS_PER_ROW = 3.0  # after which the kernel ends the process
BYTES_ABOVE_START = 512 * 2**20
# Instead of a format: {"messages": [...], "arguments": {...}} is rendered with a generation prompt at its end.
PROMPT = "prompt"


class TooSlow(BaseException):
    """Raised inside a template that runs too long; not an Exception, so that no template code can swallow it."""


def main() -> None:
    """Serve until standard input ends."""
    incoming, outgoing = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # printed text must not mix with the frames
    settings = read_frame(incoming)
    if settings is None:
        return
    _limit_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    signal.signal(signal.SIGVTALRM, _too_slow)
    try:
        renderer = _limited(lambda: Renderer(RenderSettings(**json.loads(settings[0]))))
    except BadRow as error:
        where = error.where if isinstance(error, BadTemplate) else "data.template or the chat template"
        write_frame(outgoing, [_answer({"error": [error.what, where, error.do]})])
        return
    write_frame(outgoing, [_answer({"ready": True})])
    while (frame := read_frame(incoming)) is not None:
        order, *rows = frame
        format, cuts = json.loads(order)
        write_frame(outgoing, [_answer(_answers(renderer, rows, format, cuts or [None] * len(rows)))])


def _answers(renderer: Renderer, rows: list[bytes], format: str, cuts: Sequence[object]) -> list[list[Any]]:
    """For each row the fields of a `RenderedRow`, or the three of a `BadRow`. Ends after the first row that uses up its
    limit: the parent decides whether to try the others. The first field is the system message, None if the row before
    has the same."""
    answers: list[list[Any]] = []
    system: str | None = None
    for raw, cut in zip(rows, cuts, strict=True):
        try:
            row = _limited(lambda raw=raw, cut=cut: _rendered(renderer, raw, format, cut))
            new, system = None if row.system == system else row.system, row.system
            answers.append([new, *_fields(row)])
        except BadRow as error:
            answers.append([error.what, error.do, error.past_limit])
            if error.past_limit:
                break
    return answers


def _fields(row: RenderedRow) -> list[Any]:
    """Eleven fields, and three more of a pair or a labelled answer."""
    fields = [row.text, row.supervised, row.planted, row.cuts, row.kind, row.digest]
    fields += [row.weight, row.remarks, row.turns, row.shape, row.prompt]
    if row.prompt_digest is not None:
        fields += [row.prompt_digest, row.label, None if row.rejected is None else _fields(row.rejected)]
    return fields


def _rendered(renderer: Renderer, raw: bytes, format: str, cut: list[Any] | None) -> RenderedRow:
    if format != PROMPT:
        return renderer.render(raw, format, Cut(*cut) if cut else None)
    given = parse(raw)
    row = renderer.prompt(Chat(given["messages"], arguments=given.get("arguments") or {}))
    if len(row.text) > MAX_CHARACTERS:
        what = f"This conversation renders to {len(row.text):,} characters; the limit is {MAX_CHARACTERS:,}."
        raise BadRow(what, "shorten it")
    renderer.check_growth(raw, row.text)
    return row


def _limited(work: Any) -> Any:
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS_PER_ROW)
        signal.setitimer(signal.ITIMER_PROF, HARD_SECONDS_PER_ROW)  # SIGPROF has no handler: it ends the process
        return work()
    except TooSlow:
        what = f"The template ran for more than {SECONDS_PER_ROW:g} seconds on one row."
        raise BadRow(what, "fix the loop in the template that does not end", past_limit=True) from None
    except MemoryError:
        what = f"The template needed more than {BYTES_ABOVE_START >> 20} MB for one row."
        raise BadRow(what, "fix the part of the template that repeats or multiplies text", past_limit=True) from None
    except RecursionError:
        raise BadRow("The template calls itself endlessly.", "fix the macro that calls itself") from None
    except BadRow:
        raise
    except TrilloraError as error:
        raise BadRow(error.what, error.do) from None
    except Exception as error:  # an invalid template or schema
        what = f"The template or schema cannot be used: {type(error).__name__}: {str(error)[:300]}"
        raise BadRow(what, "fix data.template, data.chat_template or data.json_schema") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _too_slow(number: int, frame: FrameType | None) -> None:
    raise TooSlow


def _limit_memory() -> None:
    if sys.platform != "linux":
        return  # other systems do not enforce this limit
    import resource

    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    limit = now + BYTES_ABOVE_START
    _, hard = resource.getrlimit(resource.RLIMIT_AS)  # batch systems set one, which only root may raise
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _answer(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
