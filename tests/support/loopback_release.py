"""GitHub's releases on this machine, over HTTPS: a proxy that answers for their server, with a certificate of its own.

Programs that are given the variables of `serving_release`, such as pip, fetch the real addresses from here.
"""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from loopback import serving


@contextmanager
def serving_release(files: dict[str, Path], folder: Path) -> Iterator[dict[str, str]]:
    """Serves `files`, by their addresses. Yields the environment in which pip finds and trusts them."""
    [host] = {urlparse(address).hostname for address in files}
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    names = ["-subj", f"/CN={host}", "-addext", f"subjectAltName=DNS:{host}"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    subprocess.run([*made, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    contents = {urlparse(address).path: file.read_bytes() for address, file in files.items()}

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None: ...

        def do_CONNECT(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.close_connection = True
            with context.wrap_socket(self.connection, server_side=True) as channel:
                lines = channel.recv(1 << 16).split(b"\r\n")
                body = contents.get(lines[0].split()[1].decode())
                status = "404 Not Found" if body is None else "200 OK"
                head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body or b'')}\r\nConnection: close\r\n\r\n"
                channel.sendall(head.encode() + (body or b""))

    with serving(Handler) as address:
        # Without the first two, requests prefers their certificates to pip's own.
        unset = {"REQUESTS_CA_BUNDLE": "", "CURL_CA_BUNDLE": ""}
        yield {**unset, "PIP_PROXY": address, "PIP_CERT": str(certificate), "PIP_RETRIES": "0"}
