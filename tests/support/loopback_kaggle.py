"""Kaggle's service on this machine, for Kaggle's own client: data sets, kernels, outputs and the quota.

The client has a fixed list of servers. `KAGGLE_API_ENVIRONMENT=LOCALHOST` makes it use http://localhost, and the
environment's proxy, which is this server, receives every request for it. Kernels do not run here: a test sets what
they left behind.
"""

from __future__ import annotations

import json
import threading
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from loopback import POLL

TOKEN = "KGAT_0123456789abcdef"


@dataclass
class Kernel:
    request: dict[str, Any]  # of the last push
    status: str = "QUEUED"
    output: dict[str, bytes] = field(default_factory=dict)


class Kaggle:
    """The state of the service. `refuse` maps a call to the fields of its answer."""

    def __init__(self) -> None:
        self.kernels: dict[str, Kernel] = {}
        self.datasets: dict[str, list[dict[str, bytes]]] = {}  # by name: the files of every version
        self.blobs: dict[str, tuple[str, bytes]] = {}
        self.refuse: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self.quota_hours = 20.0
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                call = urllib.parse.urlsplit(self.path).path.rpartition("/")[2]
                service.calls.append(call)
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    self.answer(401, {"code": 401, "message": "Unauthenticated"})
                    return
                code, answer = service.handle(call, json.loads(body or b"{}"))
                self.answer(code, answer)

            def do_PUT(self) -> None:
                token = self.path.rpartition("/")[2]
                chunked = self.headers.get("Transfer-Encoding") == "chunked"
                content = self.chunks() if chunked else self.rfile.read(int(self.headers.get("Content-Length", 0)))
                service.blobs[token] = (service.blobs[token][0], content)
                self.answer(200, {})

            def do_GET(self) -> None:
                _, name, file = urllib.parse.urlsplit(self.path).path.split("/", 2)
                content = service.kernels[f"me/{name}"].output[urllib.parse.unquote(file)]
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Last-Modified", "Mon, 16 Nov 2026 00:00:00 GMT")
                self.end_headers()
                self.wfile.write(content)

            def chunks(self) -> bytes:
                content = b""
                while size := int(self.rfile.readline(), 16):
                    content += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return content

            def answer(self, code: int, tree: dict[str, Any]) -> None:
                content = json.dumps(tree).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(POLL,), daemon=True).start()

    def environment(self) -> dict[str, str]:
        """For a client that is logged in here."""
        proxy = f"http://127.0.0.1:{self._server.server_address[1]}"
        variables = {"KAGGLE_API_ENVIRONMENT": "LOCALHOST", "KAGGLE_API_TOKEN": TOKEN, "NO_PROXY": "", "no_proxy": ""}
        return variables | dict.fromkeys(("http_proxy", "HTTP_PROXY"), proxy)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def handle(self, call: str, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if call in self.refuse:
            return 200, self.refuse[call]
        missing = 404, {"code": 404, "message": "404 Client Error: Not Found"}
        match call:
            case "IntrospectToken":
                return 200, {"active": True, "username": "me", "userId": 1}
            case "GetAcceleratorQuotaStatistics":
                quota = {"timeUsed": f"{(20 - self.quota_hours) * 3600:.0f}s", "totalTimeAllowed": "72000s"}
                return 200, {"quotaRefreshTime": "2026-11-20T00:00:00Z", "tpuQuota": quota}
            case "StartBlobUpload":
                token = f"blob-{len(self.blobs)}"
                self.blobs[token] = (request["name"], b"")
                return 200, {"token": token, "createUrl": f"http://localhost/upload/{token}"}
            case "GetDatasetStatus":
                exists = f"{request['ownerSlug']}/{request['datasetSlug']}" in self.datasets
                return (200, {"status": "READY"}) if exists else missing
            case "CreateDataset" | "CreateDatasetVersion":
                slug = request.get("slug") or request["datasetSlug"]
                files = request.get("files") or request["body"]["files"]
                version = dict(self.blobs[file["token"]] for file in files)
                self.datasets.setdefault(f"{request['ownerSlug']}/{slug}", []).append(version)
                return 200, {"status": "ok", "url": f"http://localhost/{slug}"}
            case "SaveKernel":
                self.kernels[request["slug"]] = Kernel(request)
                return 200, {"versionNumber": 1, "url": f"http://localhost/code/{request['slug']}"}
            case "GetKernelSessionStatus" | "ListKernelSessionOutput":
                kernel = self.kernels.get(f"{request['userName']}/{request['kernelSlug']}")
                if kernel is None:
                    return 403, {"code": 403, "message": "Permission 'kernels.get' was denied"}
                if call == "GetKernelSessionStatus":
                    return 200, {"status": kernel.status}
                slug = request["kernelSlug"]
                return 200, {
                    "files": [
                        {"fileName": name, "url": f"http://localhost/{slug}/{urllib.parse.quote(name)}"}
                        for name in kernel.output
                    ],
                    "log": "[]",
                }
        return 500, {"code": 500, "message": f"no such call: {call}"}
