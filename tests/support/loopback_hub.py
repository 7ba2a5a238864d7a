"""A hub on this machine that takes uploads: what the real client of huggingface_hub sends to it is kept."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlparse

from loopback import serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    token: str
    is_private: dict[str, bool] = field(default_factory=dict)  # existing models
    refuses: dict[str, int] = field(default_factory=dict)  # path prefix -> status
    card_error: str | None = None
    files: dict[str, bytes] = field(default_factory=dict)  # of the commit
    objects: dict[str, bytes] = field(default_factory=dict)  # large files by SHA-256
    requests: list[str] = field(default_factory=list)
    address: str = ""


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    with serving(_handler(hub)) as hub.address:
        yield hub


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None: ...

        def reply(self, status: int, value: Any = None) -> None:
            body = json.dumps(value).encode() if value is not None else b""
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        def handle_one(self) -> None:
            path = urlparse(self.path).path
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.requests.append(f"{self.command} {path}")
            status = next((code for start, code in hub.refuses.items() if path.startswith(start)), None)
            if path.startswith("/put/"):  # a signed address, which needs no token
                hub.objects[hashlib.sha256(body).hexdigest()] = body
                self.reply(200)
            elif self.headers.get("Authorization") != f"Bearer {hub.token}":
                self.reply(401, {"error": "Invalid credentials"})
            elif status is not None:
                self.reply(status, {"error": "refused"})
            else:
                self.answer(path, body)

        def answer(self, path: str, body: bytes) -> None:
            if path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
                exists = name in hub.is_private
                wants_private = asked.get("visibility") == "private" or bool(asked.get("private"))  # by version
                hub.is_private.setdefault(name, wants_private)
                self.reply(409 if exists else 200, {"url": f"{hub.address}/{name}", "name": name})
            elif path == "/api/validate-yaml":
                errors = [{"message": hub.card_error}] if hub.card_error else []
                self.reply(400 if errors else 200, {"errors": errors, "warnings": []})
            elif "/preupload/" in path:
                files = [entry["path"] for entry in json.loads(body)["files"]]
                modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in files}
                answer = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
                self.reply(200, {"files": answer})
            elif path.endswith("/info/lfs/objects/batch"):
                objects = [
                    {**entry, "actions": {"upload": {"href": f"{hub.address}/put/{entry['oid']}"}}}
                    for entry in json.loads(body)["objects"]
                ]
                self.reply(200, {"objects": objects, "transfer": "basic"})
            elif "/commit/" in path:
                for line in body.splitlines():
                    entry = json.loads(line)
                    if entry["key"] == "file":
                        hub.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                    elif entry["key"] == "lfsFile":
                        hub.files[entry["value"]["path"]] = hub.objects[entry["value"]["oid"]]
                name = path.removeprefix("/api/models/").partition("/commit/")[0]
                self.reply(200, {"commitUrl": f"{hub.address}/{name}/commit/{COMMIT}", "commitOid": COMMIT})
            else:
                name = path.removeprefix("/api/models/")
                if name in hub.is_private:
                    self.reply(
                        200, {"_id": "1", "id": name, "sha": COMMIT, "private": hub.is_private[name], "tags": []}
                    )
                else:
                    self.reply(404, {"error": "Repository not found"})

        do_GET = do_POST = do_PUT = do_HEAD = handle_one

    return Handler
