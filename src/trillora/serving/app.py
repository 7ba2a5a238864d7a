"""The HTTP interface: the paths of the OpenAI protocol, and who may use them.

GET  /health  /v1/models  /v1/models/NAME        POST /v1/chat/completions  /v1/completions
GET  /report  the run's report.html              GET  /  a page to chat with, if the server has one
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route, Router

from trillora.serving.completions import RETRY_SECONDS, Completions
from trillora.serving.http.address import is_loopback
from trillora.serving.http.connections import MAX_DISCARDED_BYTES
from trillora.serving.page.build import Page
from trillora.serving.protocol import HttpError
from trillora.serving.served import Service
from trillora.serving.stream import ClientGone, Receive, Send, as_json, impatient

MAX_BODY_BYTES = 4 << 20
MAX_BODIES_BYTES = 256 << 20  # of all requests that are being read or wait to be
BODY_SECONDS = 30.0
PIECE_BYTES = 64 << 10  # of a large answer
RETRY = {"retry-after": str(RETRY_SECONDS)}
# The report has no scripts and makes no requests, and no site may show it in a frame.
REPORT_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
Scope = Any
Answer = Callable[[bytes, Receive, Send], Awaitable[str | None]]


class App:
    """The application of one service. `key`: what clients must send; `only_loopback`: refuse requests that reach this
    machine under another name, as a web page does that has changed its own address (DNS rebinding)."""

    def __init__(
        self, service: Service, *, key: str | None = None, only_loopback: bool = True, page: Page | None = None
    ) -> None:
        self._service, self._key, self._only_loopback = service, key, only_loopback
        self._page, self._created = page, int(time.time())
        self._completions = Completions(service)
        self._num_posts = 0  # being read or answered
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/chat/completions", _Post(self, self._completions.chat), methods=["POST"]),
            Route("/v1/completions", _Post(self, self._completions.complete), methods=["POST"]),
            Route("/report", self._report),
            Route("/", self._show_page),
        ]
        self._router = Router(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        scope["app"] = self  # so that the router raises for unknown paths
        started, send = False, impatient(send)

        async def noting(message: Any) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            self._check_sender(scope)
            await self._router(scope, receive, noting)
        except HttpError as error:
            await _error(error)(scope, receive, send)
        except HTTPException as error:
            await _error(HttpError(error.status_code, f"{error.detail}: {scope['path']}"))(scope, receive, send)
        except ClientGone:
            scope["drop_connection"]()
            await asyncio.sleep(0)  # until uvicorn knows
        except Exception:
            if started:
                raise
            problem = HttpError(500, "The server failed. It stays up; the request may be sent again.")
            await _error(problem)(scope, receive, send)
            raise

    def close(self) -> None:
        self._completions.close()

    def _check_sender(self, scope: Scope) -> None:
        """A header that comes several times must be allowed each time."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host") or [""]
        if self._only_loopback and not all(is_loopback(_host_name(host)) for host in hosts):
            raise HttpError(403, "This server only answers requests to localhost.", code="wrong_host")
        if any([origin.partition("://")[2]] != hosts for origin in headers.getlist("origin")):
            raise HttpError(403, "Web pages of other sites may not use this server.", code="wrong_origin")
        if self._key is None or not scope["path"].startswith(("/v1/", "/report")):
            return
        keys = [value.partition(" ") for value in headers.getlist("authorization")]
        if not keys or not all(kind.lower() == "bearer" and self._is_key(given) for kind, _, given in keys):
            raise HttpError(401, "The key is missing or wrong.", code="invalid_api_key")

    def _is_key(self, given: str) -> bool:
        return self._key is not None and hmac.compare_digest(given.strip().encode(), self._key.encode())

    async def _health(self, request: Request) -> Response:
        engine = self._service.engine
        counts = {"running": engine.num_running, "waiting": engine.num_waiting}
        alive = engine.is_alive
        return _json({"status": "ok" if alive else "stopping", **counts}, 200 if alive else 503)

    async def _models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._described(name) for name in self._service.models]})

    async def _model(self, request: Request) -> Response:
        return _json(self._described(self._completions.served(request.path_params["name"]).name))

    def _described(self, name: str) -> dict[str, object]:
        service = self._service
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "trillora",
            "parent": None if name == service.base else service.base,
            "max_model_len": service.engine.max_length,
            "has_chat_template": service.models[name].prompts.has_template,
            "system_message": service.models[name].system or None,  # of all training rows: clients should send it
        }

    async def _report(self, request: Request) -> Response:
        report = self._service.readable_report()
        if report is None:
            raise HttpError(404, "There is no report: this is not a run, or it has no report.html.")
        return FileResponse(report, headers=REPORT_HEADERS)

    async def _show_page(self, request: Request) -> Response:
        if self._page is None:
            raise HttpError(404, "There is no page here: start the server with --page.")
        return Response(self._page.html, headers=self._page.headers)

    async def answer(self, how: Answer, receive: Receive, send: Send) -> Response | None:
        """Reads and answers a request, unless more are open than the engine can queue."""
        engine = self._service.engine
        if self._num_posts >= engine.num_rows + engine.max_waiting:
            raise HttpError(429, "Too many requests are open.", code="queue_full", headers=RETRY)
        self._num_posts += 1
        try:
            found = await how(await self._read(receive), receive, send)
        finally:
            self._num_posts -= 1
        return None if found is None else Response(found, media_type="application/json")

    async def _read(self, receive: Receive) -> bytes:
        """The body of a request, within limits of size and time."""
        parts: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more and size <= MAX_DISCARDED_BYTES:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    parts.append(part)
                    if size > MAX_BODY_BYTES:  # clients read the answer only after they have sent their request
                        parts.clear()
                    elif size > MAX_BODIES_BYTES // self._num_posts:
                        raise HttpError(429, "Too many large requests are open.", code="queue_full", headers=RETRY)
        except TimeoutError:
            what = f"The request did not arrive within {BODY_SECONDS:g} seconds."
            raise HttpError(408, what, headers={"connection": "close"}) from None
        if size > MAX_BODY_BYTES:
            what = f"The request is too large: at most {MAX_BODY_BYTES >> 20} MiB are possible."
            raise HttpError(413, what, headers={"connection": "close"} if more else {})
        return b"".join(parts)


class _Post:
    """An endpoint that sends its answer itself. Not a function: the router gives those a `Request` instead."""

    def __init__(self, app: App, how: Answer) -> None:
        self._app, self._how = app, how

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # other kinds can be sent by a web page of any site
            raise HttpError(415, "Send JSON, with the header content-type: application/json.")
        response = await self._app.answer(self._how, receive, send)
        if response is not None:
            await _send_whole(response, send)


async def _send_whole(response: Response, send: Send) -> None:
    """A large answer in pieces. The connection waits for each, and so does the end: after it, the client has only
    `IDLE_SECONDS` until the connection is closed."""
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    for start in range(0, len(response.body), PIECE_BYTES):
        piece = bytes(response.body[start : start + PIECE_BYTES])
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(as_json(value), status, headers, "application/json")


def _error(error: HttpError) -> Response:
    return _json(error.body(), error.status, error.headers)


def _host_name(host: str) -> str:
    """Without the port: "[::1]:8000" -> "::1"."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
