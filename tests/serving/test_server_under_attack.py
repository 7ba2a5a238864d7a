"""A server process under attack: it answers `/health` within a second, its memory and its log stay small, and a signal
ends it within five seconds."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
import tiny_run
from dose import dose, log_progress
from warm_process import WarmCommand

NUM_CONNECTIONS = dose(300, 2000)
OPEN_FILES = dose(256, 4096)  # fewer than connections in the small dose
LONGEST_WAIT = 1.0  # seconds for /health
LONGEST_END = 5.0  # seconds
MOST_BYTES = 400 << 20  # that the process may need in addition
HALF_A_HEADER = b"GET /health HTTP/1.1\r\nHost: loc"
# Time that depends on the request, up to the limit of two seconds.
TEMPLATE = (
    "{% for _ in range(spin or 0) %}{% for _ in range(90000) %}{% endfor %}{% endfor %}{{ messages[0]['content'] }}"
)


class Command:
    """`trillora serve` as a process, and its log."""

    def __init__(self, folder: Path) -> None:
        self._command = WarmCommand("serve", str(folder / "model"), "--port", "0", "--rows", "4", errors=True)
        self.process = psutil.Process(self._command._process.pid)
        self.process.rlimit(psutil.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
        self.text = ""
        while "(Ctrl+C stops)" not in self.text and (line := self._command.stdout.readline()):
            self.text += line
        found = re.search(r"http://127.0.0.1:(\d+)", self.text)
        assert found is not None, self.text
        self.port, self.url, self.text = int(found[1]), found[0], ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self._command.stdout:
            self.text += line

    def connect(self, data: bytes = b"") -> socket.socket:
        opened = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        opened.sendall(data)
        return opened

    def post(self, path: str, body: Any, timeout: float = 30) -> httpx.Response:
        return httpx.post(self.url + path, json={"model": "model", **body}, timeout=timeout)

    def end(self, *pauses: float) -> tuple[int | None, float]:
        """The exit code, and the seconds after SIGTERM, or after the last of several with pauses."""
        for pause in pauses:
            self.process.send_signal(signal.SIGTERM)
            time.sleep(pause)
        started = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self._command._process.join(30)
        seconds = time.monotonic() - started
        self.kill()
        return self._command.returncode, seconds

    def kill(self) -> None:
        self._command.kill()
        self._reader.join()
        self._command.stdout.close()


class Watch:
    """Asks for /health all the time, each time on a new connection, and looks at the memory."""

    def __init__(self, command: Command) -> None:
        self.slowest, self.num_asked, self.most_bytes, self.failures = 0.0, 0, 0, list[str]()
        self._command, self._stop = command, threading.Event()
        self.bytes_before = command.process.memory_info().rss
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._stop.is_set():
            started = time.monotonic()
            try:
                answer = ask_health(self._command.port)
                if not answer.startswith(b"HTTP/1.1 200"):
                    self.failures.append(repr(answer[:200]))
            except OSError as error:
                self.failures.append(repr(error))
            self.slowest, self.num_asked = max(self.slowest, time.monotonic() - started), self.num_asked + 1
            self.most_bytes = max(self.most_bytes, self._command.process.memory_info().rss)
            time.sleep(0.02)

    def check(self, name: str) -> None:
        used = (self.most_bytes - self.bytes_before) >> 20
        text = f"{name}: slowest /health {self.slowest:.2f} s of {self.num_asked}, {used} MiB more memory, "
        text += f"at most {self.most_bytes >> 20} MiB"
        report(text)
        assert not self.failures and self.num_asked > 5, self.failures[:3]
        assert self.slowest < LONGEST_WAIT and used < MOST_BYTES >> 20, text


def ask_health(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as opened:
        opened.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return b"".join(iter(lambda: opened.recv(4096), b""))


def wait_until(condition: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextlib.contextmanager
def closing_all(sockets: list[socket.socket]) -> Iterator[None]:
    try:
        yield
    finally:
        for opened in sockets:
            opened.close()


@contextlib.contextmanager
def kept_busy(command: Command) -> Iterator[None]:
    """With 200 answers to write, 20 prompts that use up their time, and half-sent requests."""
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    )
    message = {"model": "model", "messages": [{"role": "user", "content": "a"}], "ignore_eos": True}
    sockets = [command.connect(HALF_A_HEADER) for _ in range(dose(100, 2000))]
    with closing_all(sockets):
        for options in (*[{"n": 100}] * 2, *[{"chat_template_kwargs": {"spin": 10_000}}] * 20):
            body = json.dumps({**message, **options}).encode()
            sockets.append(command.connect(head + f"{len(body)}\r\n\r\n".encode() + body))
        sockets.append(command.connect(head + b"1000\r\n\r\n"))
        wait_until(lambda: b'"waiting":0' not in ask_health(command.port))
        yield


def report(text: str) -> None:
    print(text)
    log_progress(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attack")
    (tiny_run.write_model(folder / "model", tiny_run.llama(1)) / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def command(folder: Path) -> Iterator[Command]:
    """One for all attacks. At last, a signal ends it while it is busy."""
    command = Command(folder)
    try:
        yield command
        with kept_busy(command):
            code, seconds = command.end()
        report(f"SIGTERM: ended after {seconds:.1f} s, log of {len(command.text)} characters")
        assert code == 0 and seconds < LONGEST_END
        assert "Traceback" not in command.text and len(command.text) < 2000, command.text
    finally:
        command.kill()


def test_many_connections_with_half_a_header_leave_room_for_others(command: Command) -> None:
    sockets: list[socket.socket] = []
    with closing_all(sockets), Watch(command) as watch:
        for i in range(NUM_CONNECTIONS):
            sockets.append(command.connect(HALF_A_HEADER if i % 2 else b""))
        time.sleep(1)
        assert command.process.num_fds() < OPEN_FILES * 0.75
        with contextlib.suppress(ConnectionError):  # the first ones were closed
            assert sockets[1].recv(100) == b""
        sockets[-1].sendall(b"alhost\r\n\r\n")
        assert sockets[-1].recv(100).startswith(b"HTTP/1.1 200")
    watch.check(f"{NUM_CONNECTIONS} half headers")
    assert command.text == ""


def test_prompts_are_counted_before_they_are_read(command: Command) -> None:
    number = dose(300_000, 500_000)
    bodies = [
        {"prompt": [[1]] * number, "n": 128, "max_tokens": 1},
        {"prompt": [[1]] * 200_000, "n": 128, "max_tokens": 1},  # passes the first limit
        {"prompt": [[5, 6, 7]] * 20_000, "n": 128, "max_tokens": 1},
        {"prompt": ["a b c"] * 100, "n": 2, "max_tokens": 1},
        {"prompt": [1] * 1_900_000, "max_tokens": 1},
        {"prompt": [{}] * 100_000},
        {"prompt": "a", "stop": [1] * 1_000_000},
        {"prompt": "word " * 800_000},
    ]
    with Watch(command) as watch:
        for body in bodies:
            answer = command.post("/v1/completions", body)
            assert answer.status_code == 400 and len(answer.text) < 500, answer.text
        nested = {"messages": [{"role": "user", "content": [{}] * 200_000}]}
        assert command.post("/v1/chat/completions", nested).status_code == 400
    watch.check(f"{number} prompts")


def test_a_body_without_end_is_not_read_on(command: Command) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    large, small = (
        b"10000\r\n" + b" " * 65536 + b"\r\n",
        b"1\r\n \r\n" * 5000,
    )  # a small chunk costs as much as a large one
    with Watch(command) as watch:
        for path, chunk, most in (
            (b"/v1/completions", large, 200 << 20),
            (b"/nothing", large, 200 << 20),
            (b"/v1/completions", small, 20 << 20),
        ):
            sent, start = 0, head.replace(b"/v1/completions", path) + b"Transfer-Encoding: chunked\r\n\r\n"
            with command.connect(start + chunk) as opened, pytest.raises(ConnectionError):
                while sent < most:
                    sent += opened.send(chunk)
        time.sleep(0.2)
    watch.check("bodies without end")


def test_a_prompt_that_uses_its_time_does_not_delay_others(command: Command) -> None:
    def ask(spin: int) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        return command.post("/v1/chat/completions", {**body, "chat_template_kwargs": {"spin": spin}})

    assert ask(0).status_code == 200  # the programs are compiled
    slow = [threading.Thread(target=lambda: answers.append(ask(10_000))) for _ in range(2)]
    answers: list[httpx.Response] = []
    with Watch(command) as watch:
        for thread in slow:
            thread.start()
        time.sleep(0.5)
        assert ask(0).status_code == 200
        assert not answers
        for thread in slow:
            thread.join()
    assert [answer.status_code for answer in answers] == [400, 400]
    assert all("2 seconds" in answer.text for answer in answers), answers[0].text
    watch.check("2 slow templates")


def test_a_second_signal_ends_a_busy_server_at_once(folder: Path) -> None:
    command = Command(folder)
    with kept_busy(command):
        code, seconds = command.end(0.5)
    assert code == 128 + signal.SIGTERM and seconds < 1.5  # after one signal it takes 2 s or more
    assert command.text == ""
