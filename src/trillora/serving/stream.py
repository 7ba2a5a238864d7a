"""From the engine's thread to a client: pieces of answers, collected until the client takes them.

The engine never waits for a client. Pieces that a slow client has not taken are joined to one, so they need no more
memory than the answer itself. A client that takes nothing for a minute, or is gone, loses its answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from trillora.errors import TrilloraError
from trillora.serving.answers import joined
from trillora.serving.job import AnswerPiece
from trillora.serving.protocol import HttpError, in_words

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
SLOW_CLIENT_SECONDS = 60.0
KEEP_ALIVE_SECONDS = 10.0  # without text, a comment shows that the connection is alive


class ClientGone(Exception):
    """The client has closed its connection, or does not read."""


class Inbox:
    """The pieces of the answers of one request."""

    def __init__(self, num_answers: int) -> None:
        self._loop, self._arrived = asyncio.get_running_loop(), asyncio.Event()
        self._pieces: list[list[AnswerPiece]] = [[] for _ in range(num_answers)]
        self._num_open = num_answers
        self._is_gone = False

    def receiver(self, index: int) -> Callable[[AnswerPiece], None]:
        """A function for the engine's thread."""

        def receive(piece: AnswerPiece) -> None:
            try:
                self._loop.call_soon_threadsafe(self._add, index, piece)
            except RuntimeError:  # the loop is closed: no one waits for the answer
                return

        return receive

    def leave(self) -> None:
        """The client is gone."""
        self._is_gone = True
        self._arrived.set()

    async def __aiter__(self) -> AsyncIterator[list[tuple[int, AnswerPiece]]]:
        """What has arrived, one piece for each answer; nothing after `KEEP_ALIVE_SECONDS`. Ends with the answers."""
        while self._num_open:
            try:
                async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                    await self._arrived.wait()
            except TimeoutError:
                yield []
                continue
            if self._is_gone:
                raise ClientGone
            self._arrived.clear()
            found = [(index, joined(pieces)) for index, pieces in enumerate(self._pieces) if pieces]
            self._pieces = [[] for _ in self._pieces]
            self._num_open -= sum(piece.is_last for _, piece in found)
            yield found

    def _add(self, index: int, piece: AnswerPiece) -> None:
        self._pieces[index].append(piece)
        self._arrived.set()


@contextlib.asynccontextmanager
async def watching(receive: Receive, when_gone: Callable[[], object]) -> AsyncIterator[None]:
    """Watches for the end of a connection whose request was read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        when_gone()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


class EventSender:
    """Sends server-sent events to one client."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def open(self) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def events(self, values: Sequence[dict[str, object]]) -> None:
        await self.text(as_events(values))

    async def keep_alive(self) -> None:
        await self.text(": waiting\n\n")

    async def close(self) -> None:
        await self.text("data: [DONE]\n\n")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: TrilloraError) -> None:
        """An end without an answer: a stream that just ends looks like a whole answer."""
        await self.events([HttpError(500, in_words(error)).body()])
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def text(self, text: str) -> None:
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": True})


def impatient(send: Send) -> Send:
    """Sends to a client that must read."""

    async def timed(message: MutableMapping[str, object]) -> None:
        try:
            async with asyncio.timeout(SLOW_CLIENT_SECONDS):
                await send(message)
        except (TimeoutError, OSError) as error:
            raise ClientGone from error

    return timed


def as_events(values: Sequence[dict[str, object]]) -> str:
    return "".join(f"data: {as_json(value)}\n\n" for value in values)


def as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
