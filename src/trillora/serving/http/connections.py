"""The connections of a server, with limits that uvicorn does not have.

- A connection that has sent no whole header for `IDLE_SECONDS` is closed, however slowly it sends.
- At most `limit` connections are open. A new one replaces the one that has waited longest without a request. If all
  have requests, the new one is refused.
- After an answer, the rest of a request's body is read up to a limit: clients read the answer only after they have sent
  their request.
"""

from __future__ import annotations

import contextlib
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

IDLE_SECONDS = 30.0
MOST_CONNECTIONS = 1024
ACCEPTED_AT_ONCE = 16  # connections that are accepted before one can be closed
MAX_DISCARDED_BYTES = 64 << 20
HEADER_BYTES = 4096  # read at once
MOST_LINES = 4096  # in one chunked body: each chunk has two, and costs 20 microseconds of the event loop
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 5\r\nconnection: close\r\n\r\n"
    b'{"error":{"message":"Too many connections are open.","type":"server_error","param":null,"code":"busy"}}'
)


def connection_limit() -> int:
    """Well below the limit of open files, which the server needs for other things too."""
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_CONNECTIONS if open_files == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, open_files // 2)


class Connections(ServerState):
    """All connections of a server."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = connection_limit()
        self.waiting: dict[Connection, None] = {}  # those without a request, by the time they have waited


class Connection(H11Protocol):
    """One connection. A client that has not sent its request is closed without an answer."""

    server_state: Connections
    _timer: Any = None
    _num_discarded = 0  # bytes after the answer
    _num_lines = 0  # of the body

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        state = self.server_state
        if len(state.connections) > state.limit:
            if not state.waiting:
                transport.write(REFUSAL)
                transport.close()
                return
            next(iter(state.waiting)).drop()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while data and not self.transport.is_closing():
            if self.conn.their_state is h11.SEND_BODY:
                part, data = data, b""
                self._num_lines += part.count(b"\r\n") if self._is_chunked() else 0
                self._num_discarded += len(part) if self._is_answered() else 0
                if self._num_discarded > MAX_DISCARDED_BYTES or self._num_lines > MOST_LINES:
                    self.drop()
                    return
            else:  # a little, because chunks may follow the header
                part, data = data[:HEADER_BYTES], data[HEADER_BYTES:]
            super().data_received(part)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._stop_waiting()
            self._num_discarded = self._num_lines = 0
            self.scope["drop_connection"] = self.drop  # type: ignore[typeddict-unknown-key]

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_answered():  # no other request was waiting in the buffer
            self._wait()

    def send_400_response(self, msg: str) -> None:
        with contextlib.suppress(h11.LocalProtocolError):  # after the beginning of another answer
            super().send_400_response(msg)
        self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        self.drop()

    def shutdown(self) -> None:
        if self in self.server_state.waiting:
            self.drop()
        elif not self._is_answered():
            super().shutdown()

    def drop(self) -> None:
        """Closes the connection now, even if the client does not read."""
        self._stop_waiting()
        self.transport.abort()

    def _wait(self) -> None:
        self._stop_waiting()
        if not self.transport.is_closing():
            self.server_state.waiting[self] = None
            self._timer = self.loop.call_later(IDLE_SECONDS, self.drop)

    def _stop_waiting(self) -> None:
        self.server_state.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    def _is_answered(self) -> bool:
        return self.cycle is not None and self.cycle.response_complete

    def _is_chunked(self) -> bool:
        return any(name == b"transfer-encoding" for name, _ in self.headers)
