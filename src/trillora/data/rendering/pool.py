"""Renders batches of rows in worker processes, in parallel and in order.

The parent keeps all workers busy while it tokenizes their results. If a worker dies, the rows of its batch are tried
one by one, and a row that kills its worker again is a bad row. A template that uses up its limits on every row is not
tried on all of them (`Worker`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any

from trillora.child_process import bare_environment, isolated_python, read_frame, write_frame
from trillora.data.rendering.render import Cut, RenderedRow, RenderSettings
from trillora.data.rendering.worker import SECONDS_PER_ROW
from trillora.data.rows import BadRow, RawRow
from trillora.errors import TrilloraError

MAX_WORKERS = 16
MAX_PAST_LIMIT = 10  # rows that may use up their time or memory; with more, the template is the problem
MAX_AT_START = 3  # the same, if these are the first rows
_PROGRAM = "from trillora.data.rendering.worker import main; main()"
Outcome = RenderedRow | BadRow


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of one file that have the same format."""

    file: int
    format: str
    rows: list[RawRow]


class Worker:
    """One worker process, restarted when it dies.

    A template without end would cost the time limit once for every row. So when rows use up their limits, later ones
    are not tried: after `max_past_limit` of them, or after the first `MAX_AT_START` rows if no row was rendered yet.
    With None every row is tried: a server's rows come from people who have nothing to do with each other.
    """

    def __init__(self, settings: RenderSettings, max_past_limit: int | None = MAX_PAST_LIMIT) -> None:
        self._settings = json.dumps(dataclasses.asdict(settings)).encode("utf-8", "surrogatepass")
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._is_stopped = False
        self.max_past_limit = max_past_limit
        self._num_past_limit = 0  # rows that used up their limit
        self._last_past_limit: BadRow | None = None
        self._num_rendered = 0  # all others

    def render(self, rows: Sequence[bytes], format: str, cuts: Sequence[Cut] | None = None) -> list[Outcome]:
        """The outcome of each row."""
        outcomes: list[Outcome] = []
        is_searching = False  # a row killed the process: they are sent one by one until it is found
        while (done := len(outcomes)) < len(rows):
            if self._is_hopeless():
                return outcomes + [self._not_tried()] * (len(rows) - done)
            end = done + 1 if is_searching or not self._num_rendered else len(rows)
            some = self._render_until_limit(rows[done:end], format, cuts[done:end] if cuts else None)
            if not some:
                is_searching = True
                continue
            slow = [outcome for outcome in some if isinstance(outcome, BadRow) and outcome.past_limit]
            if slow:
                self._num_past_limit, self._last_past_limit = self._num_past_limit + len(slow), slow[-1]
            self._num_rendered += len(some) - len(slow)
            is_searching = is_searching and not slow
            outcomes += some
        return outcomes

    def _render_until_limit(self, rows: Sequence[bytes], format: str, cuts: Sequence[Cut] | None) -> list[Outcome]:
        """The outcomes up to the first row that uses up its limit; none if one of several rows kills the process."""
        self.start()
        order = [format, [dataclasses.astuple(cut) for cut in cuts] if cuts else None]
        answers = self._exchange([json.dumps(order).encode(), *rows])
        if answers is not None:
            return _outcomes(answers)
        self.close()
        if len(rows) > 1:
            return []
        limits = f"more than {SECONDS_PER_ROW:g} seconds or too much memory"
        do = "remove the row, or fix a loop in the template that does not end"
        return [BadRow(f"Rendering one row killed the worker: it took {limits}.", do, past_limit=True)]

    def _is_hopeless(self) -> bool:
        most = self.max_past_limit
        if most is None:
            return False
        return self._num_past_limit >= (most if self._num_rendered else min(most, MAX_AT_START))

    def _not_tried(self) -> BadRow:
        last = self._last_past_limit
        assert last is not None
        why = f"This happened on {self._num_past_limit} rows, so the template was not tried on this one."
        return BadRow(f"{last.what} {why}", last.do, past_limit=True)

    def start(self) -> None:
        """Start the process unless it runs. Raises if a template does not compile."""
        if self._is_stopped:
            raise RuntimeError("The pool is closed.")  # in the thread of a batch that is not needed any more
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        # No secrets for a template that escapes the sandbox.
        child = isolated_python(_PROGRAM, environment=bare_environment())
        self._process = subprocess.Popen(
            child.command, env=child.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr
        )
        reply = self._exchange([self._settings])
        if reply is None:
            self._stderr.seek(0)
            last = self._stderr.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
            self.close()
            what = f"The worker that renders rows did not start, or died while compiling the templates. {last}".rstrip()
            do = "check the chat template and data.template for very large constant expressions"
            raise TrilloraError(what, where="data", do=do)
        if "error" in reply:
            self.close()
            what, where, do = reply["error"]
            raise TrilloraError(what, where=where, do=do)

    def stop(self) -> None:
        """End a rendering in another thread: the process is killed and not started again."""
        self._is_stopped = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        if self._process is not None:
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
            self._process.kill()
            self._process.wait()
        if self._stderr is not None:
            self._stderr.close()
        self._process = self._stderr = None

    def _exchange(self, parts: Sequence[bytes]) -> Any:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            write_frame(self._process.stdin, parts)  # type: ignore[arg-type]
        except OSError:
            return None
        reply = read_frame(self._process.stdout)  # type: ignore[arg-type]
        return None if reply is None else json.loads(reply[0].decode("utf-8", "surrogatepass"))


class Pool:
    """Workers for one set of templates and one tokenizer."""

    def __init__(
        self, settings: RenderSettings, num_workers: int | None = None, *, max_past_limit: int = MAX_PAST_LIMIT
    ) -> None:
        count = num_workers or min(MAX_WORKERS, os.cpu_count() or 1)
        self._workers = [Worker(settings, max_past_limit) for _ in range(count)]
        self._idle = collections.deque(self._workers)
        self._threads = ThreadPoolExecutor(count)

    def __enter__(self) -> Pool:
        try:
            self._workers[0].start()  # reports errors in a template before any row is read
        except BaseException:
            self._threads.shutdown(wait=False)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.stop()
        self._threads.shutdown(cancel_futures=True)  # a thread that still renders would start its worker again
        for worker in self._workers:
            worker.close()

    def render(self, rows: Sequence[bytes], format: str, cuts: Sequence[Cut] | None = None) -> list[Outcome]:
        """Render one batch now."""
        return self._threads.submit(self._with_worker, rows, format, cuts).result()

    def map(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, list[Outcome]]]:
        """Every batch with its outcomes, in order. A few batches are rendered ahead."""
        waiting: collections.deque[tuple[Batch, Future[list[Outcome]]]] = collections.deque()
        for batch in batches:
            rows = [row.raw for row in batch.rows]
            waiting.append((batch, self._threads.submit(self._with_worker, rows, batch.format, None)))
            if len(waiting) > len(self._workers) + 1:
                first, future = waiting.popleft()
                yield first, future.result()
        yield from ((first, future.result()) for first, future in waiting)

    def _with_worker(self, rows: Sequence[bytes], format: str, cuts: Sequence[Cut] | None) -> list[Outcome]:
        worker = self._idle.popleft()  # as many threads as workers: one is always idle
        try:
            return worker.render(rows, format, cuts)
        finally:
            self._idle.append(worker)


def _outcomes(answers: list[list[Any]]) -> list[Outcome]:
    """What the worker answered (`worker._answers`)."""
    outcomes: list[Outcome] = []
    system = ""
    for answer in answers:
        if len(answer) == 3:
            outcomes.append(BadRow(*answer))
            continue
        new, *fields = answer
        system = system if new is None else new
        outcomes.append(_row_of(system, *fields))
    return outcomes


def _row_of(
    system: str, text: str, supervised: list[Any], planted: list[Any], cuts: list[int], *others: Any
) -> RenderedRow:
    """The row whose fields these are (`worker._fields`)."""
    kind, digest, weight, remarks, turns, shape, prompt, *preference = others
    spans = tuple(map(tuple, supervised)), tuple(map(tuple, planted))
    prompt_digest, label, rejected = preference or (None, None, None)
    return RenderedRow(
        text,
        *spans,
        tuple(cuts),
        kind,
        digest,
        weight,
        tuple(remarks),
        turns,
        shape,
        prompt_digest,
        label,
        None if rejected is None else _row_of(system, *rejected),
        system,
        prompt,
    )
