"""Where a server listens, and the key that it asks for. Both are known to be right before a model is loaded."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket

from trillora.errors import TrilloraError

SHORTEST_KEY = 8  # characters


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
    except (OSError, OverflowError, UnicodeError) as error:  # a label of a host name may be too long or empty
        if opened is not None:
            opened.close()
        raise TrilloraError(
            f"The address {host}:{port} cannot be used: {error}.",
            where="--host and --port",
            do="choose another --port; 0 takes any that is free",
        ) from None
    return opened


def is_loopback(host: str) -> bool:
    """Whether this name or address always means the machine itself."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
