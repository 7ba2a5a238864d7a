"""A web server on this machine, and a listener that keeps every event, for tests of clients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from trillora.events import Alarm, Event, Note

POLL = 0.02  # seconds until a server notices that it has to stop; by default half a second


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server that runs until the end of the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(POLL,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Heard:
    """A listener that keeps the texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Note | Alarm):
            self.texts.append(event.text)

    def __str__(self) -> str:
        return "\n".join(self.texts)
