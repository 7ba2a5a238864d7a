"""Data sets on a hub on this machine, for the real client of huggingface_hub: lists of files, and parts of files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlparse

from loopback import serving

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"


@dataclass
class DatasetHub:
    """`revisions` are the files of one data set by branch; their commit is `COMMIT`, or the branch itself."""

    name: str
    revisions: dict[str, dict[str, bytes]]
    card: dict[str, Any] = field(default_factory=dict)
    sent_instead: dict[str, bytes] = field(default_factory=dict)  # what a proxy makes of files, of the same size
    num_bytes: int = 0  # of files, sent so far
    read: set[str] = field(default_factory=set)  # paths of files of which something was sent
    address: str = ""

    def files(self, revision: str) -> dict[str, bytes] | None:
        return self.revisions.get("main" if revision == COMMIT else revision)


@contextmanager
def running(hub: DatasetHub) -> Iterator[DatasetHub]:
    with serving(_handler(hub)) as hub.address:
        yield hub


def _facts(path: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return {"rfilename": path, "size": len(content), "blobId": blob}


def _entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "oid": _facts(path, content)["blobId"], "size": len(content)}


class _Handler(BaseHTTPRequestHandler):
    hub: DatasetHub
    protocol_version = "HTTP/1.1"

    @property
    def api(self) -> str:
        return f"/api/datasets/{self.hub.name}"

    @property
    def files_at(self) -> str:
        return f"/datasets/{self.hub.name}/resolve/"

    def log_message(self, format: str, *args: Any) -> None: ...

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_json(self, value: Any) -> None:
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def refuse(self, code: str) -> None:
        self.reply(404, b"{}", {"X-Error-Code": code})

    def do_GET(self) -> None:
        path = urlparse(self.path).path
        if path.startswith(self.files_at):
            revision, _, name = path.removeprefix(self.files_at).partition("/")
            self.send_file(unquote(revision), unquote(name))
        elif path == self.api or path.startswith(f"{self.api}/revision/"):
            revision = unquote(path.removeprefix(f"{self.api}/revision/")) if path != self.api else "main"
            files = self.hub.files(revision)
            if files is None:
                return self.refuse("RevisionNotFound")
            commit = COMMIT if revision in ("main", COMMIT) else revision
            facts = {"id": self.hub.name, "sha": commit, "cardData": self.hub.card, "private": False, "gated": False}
            facts["siblings"] = [_facts(*item) for item in files.items()]
            self.send_json(facts)
        elif path.startswith(f"{self.api}/tree/"):
            revision, _, folder = path.removeprefix(f"{self.api}/tree/").partition("/")
            files = self.hub.files(unquote(revision)) or {}
            below = f"{unquote(folder)}/" if folder else ""
            self.send_json([_entry(name, files[name]) for name in files if name.startswith(below)])
        else:
            self.refuse("RepoNotFound")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        revision = unquote(urlparse(self.path).path.removeprefix(f"{self.api}/paths-info/"))
        files = self.hub.files(revision) or {}
        self.send_json([_entry(path, files[path]) for path in asked["paths"] if path in files])

    def send_file(self, revision: str, name: str) -> None:
        content = (self.hub.files(revision) or {}).get(name)
        if content is None:
            return self.refuse("EntryNotFound")
        start, end = 0, len(content)
        if bounds := self.headers.get("Range"):
            first, _, last = bounds.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1, len(content)) if last else len(content)
        sent = self.hub.sent_instead.get(name, content)
        if self.command == "GET":
            self.hub.num_bytes += end - start
            self.hub.read.add(name)
        headers = {
            "ETag": f'"{_facts(name, content)["blobId"]}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        if bounds:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        self.reply(206 if bounds else 200, sent[start:end], headers)


def _handler(hub: DatasetHub) -> type[BaseHTTPRequestHandler]:
    return type("Handler", (_Handler,), {"hub": hub})
