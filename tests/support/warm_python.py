"""A `python` whose runs of `-m trillora` start quickly: forked from a process that has already imported everything.

For tests of programs that start `python -m trillora` themselves, such as notebooks and the scripts of a rented machine.
`write_warm_python` writes the program. Its process stays until the fork ends: it passes on signals and the exit code,
and if it is killed, the fork is killed too. Anything but `-m trillora` is given to the real Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import sys
import threading
import traceback
from pathlib import Path

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
BYTES = struct.Struct("!I")  # how long a message is, and an exit code
STREAMS = 3


def write_warm_python(folder: Path) -> Path:
    """Starts the process that forks, and returns the program."""
    from warm_process import CONTEXT

    folder.mkdir(parents=True, exist_ok=True)
    place = folder / "socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place))
    listener.listen(16)
    CONTEXT.Process(target=_serve, args=(listener,), daemon=True).start()
    listener.close()
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {Path(__file__).resolve()} {place} "$@"\n')
    program.chmod(0o755)
    return program


# ---- the process that forks


def _serve(listener: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no one waits for those that answer
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _answer(connection)
        connection.close()


def _answer(connection: socket.socket) -> None:
    """Forks the run of one program, passes on its signals and sends its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    header, streams, _, _ = socket.recv_fds(connection, BYTES.size, STREAMS)
    request = json.loads(_read(connection, BYTES.unpack(header)[0]))
    child = os.fork()
    if child == 0:
        connection.close()
        _run(request, streams)
    for stream in streams:
        os.close(stream)

    def pass_on() -> None:
        with contextlib.suppress(ProcessLookupError, ConnectionResetError):
            while number := connection.recv(1):
                os.kill(child, number[0])
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # the program was killed

    threading.Thread(target=pass_on, daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(BYTES.pack(code if code >= 0 else 128 - code))
    os._exit(0)


def _run(request: dict[str, object], streams: list[int]) -> None:
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    for number in PASSED_ON:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.chdir(str(request["folder"]))
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[arg-type]
    sys.argv = ["trillora", *request["words"]]  # type: ignore[misc]
    from trillora.cli import main

    code: object = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = 0 if end.code is None else end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


# ---- the program


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        if not (part := connection.recv(size - len(found))):
            raise EOFError("the other process has ended")
        found += part
    return found


def main(place: str, words: list[str]) -> int:
    command = words[1:] if words[:1] == ["-P"] else words
    if command[:2] != ["-m", "trillora"]:
        os.execv(sys.executable, [sys.executable, *words])
    request = {"words": command[2:], "folder": os.getcwd(), "environment": dict(os.environ)}
    text = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(place)
        socket.send_fds(connection, [BYTES.pack(len(text))], [0, 1, 2])
        connection.sendall(text)
        for number in PASSED_ON:
            signal.signal(number, lambda number, frame: connection.sendall(bytes([number])))
        return int(BYTES.unpack(_read(connection, BYTES.size))[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
