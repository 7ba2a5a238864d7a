"""Secrets that commands get in their environment and must never show, and the search for them.

    SECRETS                        {"HF_TOKEN": "hf_Canary0…", …}
    find_secrets(folder, output)   ["new/chat.ipynb, data/chats.jsonl: HF_TOKEN"]

Archives are unpacked, and so are the archives that a notebook contains as base64.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import io
import re
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

SECRETS = {
    "HF_TOKEN": "hf_Canary0Canary1Canary2Canary3Canary",
    "WANDB_API_KEY": "c4a9a12fc4a9a12fc4a9a12fc4a9a12fc4a9a12f",
    "MY_DATABASE_PASSWORD": "canary-horse-7731-battery",
    "AWS_SECRET_ACCESS_KEY": "canary/Cloud+Key/0123456789/canary/Cloud",
    "KAGGLE_KEY": "0ca4a9a12f0ca4a9a12f0ca4a9a12f00",
}
_EMBEDDED = re.compile(rb"[A-Za-z0-9+/]{100,}={0,2}")
_NEXT_LINE = re.compile(rb'\\n",\s*"')  # a notebook is a list of lines


def find_secrets(folder: Path, output: str = "") -> list[str]:
    """Where the secrets are: in the text, or in the regular files of the folder."""
    places = [("the output", output.encode())]
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not file.is_symlink():
            places += [(f"{file.relative_to(folder)}{inner}", data) for inner, data in contents(file.read_bytes())]
    return [
        f"{where}: {name}"
        for where, data in places
        for name, secret in SECRETS.items()
        if secret.encode() in data or base64.b64encode(secret.encode()) in data
    ]


def contents(data: bytes) -> Iterator[tuple[str, bytes]]:
    """The data itself, and everything that is packed in it: (", name in the archive", bytes)."""
    yield "", data
    try:
        if data.startswith(b"\x1f\x8b"):
            yield from contents(gzip.decompress(data))
        elif data.startswith(b"PK"):
            with zipfile.ZipFile(io.BytesIO(data)) as packed:
                for name in packed.namelist():
                    yield from _inside(name, packed.read(name))
        elif data[257:262] == b"ustar":
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                for entry in archive:
                    if (stream := archive.extractfile(entry)) is not None:
                        yield from _inside(entry.name, stream.read())
        elif data.lstrip().startswith(b"{"):
            for text in _EMBEDDED.findall(_NEXT_LINE.sub(b"", data)):
                yield from _inside("base64", base64.b64decode(text))
    except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, binascii.Error):
        return  # a damaged archive: its bytes were given above


def _inside(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    for inner, each in contents(data):
        yield f", {name}{inner}", each


CANARIES = {
    "hub": "hf_" + "CanaryHub" * 3,
    "hub in words": "use hf_" + "CanaryHub" * 3 + ", please",
    "model service": "sk-proj-" + "CanaryModel" * 3,
    "git": "ghp_" + "CanaryGit" * 4,
    "cloud": "AKIA" + "CANARYCANARYCANA",
    "browser": "AIza" + "CanaryBrowser" * 3,
    "web token": "eyJhbGciOiJI.eyJzdWIiOiIx.CanaryWebToken",
    "header": "Authorization: Bearer CanaryHeader123456",
    "old wandb": "ca0a12" * 6 + "ca0a",
    "new wandb": "wandb_v1_" + "CanaryBand" * 4,
    "address": "https://me:CanaryPass@example.org/rows.jsonl",
    "signed address": "https://example.org/rows.jsonl?a=1&X-Amz-Signature=CanarySigned&b=2",
    "private key": "-----BEGIN PRIVATE KEY-----\nCanaryKey\n-----END PRIVATE KEY-----",
}
