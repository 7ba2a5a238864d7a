"""The server as a process: its socket, its signals, and a clean end.

After SIGINT or SIGTERM it takes no new requests, finishes those that run, and ends. Those that take longer than
`GRACE_SECONDS` end with an error that says so. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from trillora.errors import TrilloraError
from trillora.serving.app import App, is_loopback
from trillora.serving.engine import Engine

GRACE_SECONDS = 30.0
SHORTEST_KEY = 8  # characters
IDLE_SECONDS = 75  # a connection without a request is closed


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
    except (OSError, OverflowError) as error:
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
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=IDLE_SECONDS,
                timeout_graceful_shutdown=int(GRACE_SECONDS + 10),  # for clients that do not read the end
                http="h11",
                ws="none",
            )
        )
        self._app, self._engine, self._socket = app, engine, opened

    async def run_until_stopped(self, when_ready: Callable[[], None] = lambda: None) -> None:
        """Serves until `should_exit`, and stops the engine."""
        try:
            ready = asyncio.create_task(self._call_when_started(when_ready))
            await self.serve([self._socket])
            ready.cancel()
        finally:
            self._app.close()
            await asyncio.to_thread(self._engine.close)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.stop(GRACE_SECONDS)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Two signals end the server; uvicorn would raise them again after its end."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        try:
            for number in numbers:
                loop.add_signal_handler(number, self._on_signal)
        except (RuntimeError, ValueError, NotImplementedError):  # not the main thread
            yield
            return
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self.should_exit:
            self.force_exit = True
            self._engine.stop(0.0)
        self.should_exit = True

    async def _call_when_started(self, when_ready: Callable[[], None]) -> None:
        while not self.started:
            await asyncio.sleep(0.01)
        when_ready()
