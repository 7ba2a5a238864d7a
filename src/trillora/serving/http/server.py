"""The server as a process: its socket, its signals, and a clean end.

After SIGINT or SIGTERM it takes no new requests, finishes those that run, and ends. Those that take longer than
`GRACE_SECONDS` end with an error that says so. After `END_SECONDS` the process ends, whatever its threads are doing: a
compiler cannot be interrupted. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from trillora.errors import TrilloraError
from trillora.serving.app import App, is_loopback
from trillora.serving.engine import Engine
from trillora.serving.http.connections import ACCEPTED_AT_ONCE, IDLE_SECONDS, Connection, Connections
from trillora.serving.http.log import FailureLog, install

GRACE_SECONDS = 2.0
END_SECONDS = 3.5
SHORTEST_KEY = 8  # characters
SIGNALS = (signal.SIGINT, signal.SIGTERM)
LONGEST_QUEUE = 2048  # connections that wait to be accepted


def read_key(host: str, variable: str | None) -> str | None:
    """The key that clients must send. Only an environment variable has it: other users can read a command line."""
    if variable is None:
        if is_loopback(host):
            return None
        raise TrilloraError(
            f"A server on {host} can be reached from other machines, so it needs a key.",
            where="--host",
            do="put a key into an environment variable and name it with --key-env, or use --host 127.0.0.1",
        )
    key = os.environ.get(variable, "").strip()
    if len(key) < SHORTEST_KEY or not key.isascii():
        raise TrilloraError(
            f"The environment variable {variable} has no key of at least {SHORTEST_KEY} ASCII characters.",
            where="--key-env",
            do=f"set it, for example: export {variable}=$(openssl rand -hex 16)",
        )
    return key


def open_socket(host: str, port: int) -> socket.socket:
    """Port 0 is any free one."""
    opened: socket.socket | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        opened = socket.socket(found[0], found[1])
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(found[4])
    except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: of a host that cannot be a name
        if opened is not None:
            opened.close()
        raise TrilloraError(
            f"The address {host}:{port} cannot be used: {error}.",
            where="--host and --port",
            do="choose another --port; 0 takes any that is free",
        ) from None
    return opened


class Server(uvicorn.Server):
    """uvicorn with our end: the engine finishes its work before the connections are closed."""

    def __init__(self, app: App, engine: Engine, opened: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=int(IDLE_SECONDS),
                timeout_graceful_shutdown=math.ceil(GRACE_SECONDS + 0.5),  # for clients that do not read the end
                backlog=ACCEPTED_AT_ONCE,
                http=Connection,
                ws="none",
            )
        )
        self.server_state = Connections()
        self._app, self._engine, self._socket = app, engine, opened
        self._log = FailureLog()

    async def run_until_stopped(self, when_ready: Callable[[], None] = lambda: None) -> None:
        """Serves until `should_exit`, and stops the engine."""
        install(self._log)
        try:
            ready = asyncio.create_task(self._call_when_started(when_ready))
            await self.serve([self._socket])
            ready.cancel()
        finally:
            self._app.close()
            await asyncio.to_thread(self._engine.close)
            self._log.finish()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.stop(GRACE_SECONDS)
        await super().shutdown(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._socket.listen(LONGEST_QUEUE)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own handlers need the event loop."""
        yield

    def end_on_signals(self) -> None:
        """From now on, signals end the server and this process, which has nothing else to do afterwards. They arrive in
        a thread of their own, through a pipe, so they need neither the event loop nor the main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._obey, args=(reader,), name="signals", daemon=True).start()

    def _obey(self, reader: int) -> None:
        _next_signal(reader, None)
        self.should_exit = True
        second = _next_signal(reader, END_SECONDS)
        os._exit(0 if second is None else 128 + second)  # what the threads are doing is lost

    async def _call_when_started(self, when_ready: Callable[[], None]) -> None:
        while not self.started:
            await asyncio.sleep(0.01)
        when_ready()


def _next_signal(reader: int, seconds: float | None) -> int | None:
    """The number of the next signal that ends us, or None if none comes within this time."""
    while select.select([reader], [], [], seconds)[0]:
        number = os.read(reader, 1)[0]
        if number in SIGNALS:
            return number
    return None
