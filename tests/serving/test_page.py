"""The page of `trillora serve --page` in a real browser, against the real server.

The tiny model always answers with one token that is hostile HTML, and never stops; its adapter answers with a letter.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import hashlib
import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import Browser, needs_chromium
from chat_tokenizers import chat_tokenizer
from peft import LoraConfig, get_peft_model
from sample_runs import write_run
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, LlamaConfig

from trillora.data.rendering.formats import convert, detect
from trillora.report.run.write import write_report
from trillora.serving.app import App
from trillora.serving.http.address import open_socket
from trillora.serving.http.server import Server
from trillora.serving.page.build import chat_page
from trillora.serving.served import open_service

HOSTILE = (
    '</script></textarea><img src=http://127.0.0.1:9/ onerror=console.log("OWNED")><script>console.log("OWNED")'
    "</script>\u202e\x1b[31m "
)
SHOWN = HOSTILE.replace("\u202e", "\\u202e").replace("\x1b", "\\u001b")
KEY = "key-for-the-browser"
ANSWERED = "document.querySelectorAll('.answer').length > 0 && !document.querySelector('.waiting')"
STREAMING = "[...document.querySelectorAll('.waiting .text')].filter(e => e.textContent).length === 2"
# The page itself notices that both columns have text and continue: between two looks from here both may have ended.
WATCH = f"""window.streamed = false;
new MutationObserver(() => {{ if ({STREAMING}) window.streamed = true; }})
  .observe(document.body, {{ subtree: true, childList: true, characterData: true }})"""
CONTEXT, LONG = 4096, 500  # tokens: an answer of LONG takes about a second


def write_endless_model(folder: Path) -> Path:
    """Its hidden state is the same vector everywhere, because all embeddings are equal and no layer adds anything. So
    the head always prefers the same token. Two more tokens are preferred in a direction that only an adapter uses."""
    tokenizer = copy.deepcopy(chat_tokenizer("chatml"))
    tokenizer.add_tokens([AddedToken(HOSTILE, normalized=False)])
    width = 16
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    layer, one, two = model.model.layers[0], torch.eye(width)[0], torch.eye(width)[1]
    with torch.no_grad():
        for weight in (model.lm_head.weight, layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            weight.zero_()
        model.model.embed_tokens.weight.copy_(one.expand(len(tokenizer), width))
        model.lm_head.weight[tokenizer.convert_tokens_to_ids(HOSTILE)] = 10 * one
        for token, sign in (("A", 1), ("B", -1)):
            model.lm_head.weight[tokenizer.convert_tokens_to_ids(token)] = 100 * sign * two
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    adapted = get_peft_model(model, LoraConfig(r=1, target_modules=["down_proj"], task_type="CAUSAL_LM"))
    matrices = adapted.base_model.model.model.layers[0].mlp.down_proj
    with torch.no_grad():
        matrices.lora_A["default"].weight.fill_(1e4)  # whatever the activations are, their sum is large
        matrices.lora_B["default"].weight.copy_(two[:, None])
    adapted.save_pretrained(folder.parent / "parrot")
    return folder


class Served:
    """One service behind two servers: an open one, and one with a key."""

    def __init__(self, folder: Path) -> None:
        run = write_run(folder / "run", num_steps=40)
        service = open_service(
            str(write_endless_model(folder / "endless")), adapters=[str(folder / "parrot")], num_rows=4
        )
        self.service = service = replace(service, report=write_report(run))
        self.urls, self.servers, self.threads = [], [], []
        for key in (None, KEY):
            page = chat_page("my <b>run</b>", needs_key=key is not None, has_report=True)
            opened = open_socket("127.0.0.1", 0)
            self.urls.append(f"http://127.0.0.1:{opened.getsockname()[1]}")
            server = Server(App(service, key=key, page=page), service.engine, opened)
            ready = threading.Event()
            run_server = server.run_until_stopped(ready.set)
            thread = threading.Thread(target=asyncio.run, args=(run_server,), daemon=True)
            thread.start()
            assert ready.wait(30)
            self.servers.append(server)
            self.threads.append(thread)

    def num_running(self) -> int:
        with urllib.request.urlopen(f"{self.urls[0]}/health") as answer:
            return json.load(answer)["running"]

    def stop(self) -> None:
        for server in self.servers:
            server.should_exit = True
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("page"))
    yield served
    served.stop()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def browser(served: Served, chromium: Browser) -> Iterator[Browser]:
    """The page, just opened. At the end: no request left the server, and nothing is on the console."""
    chromium.resize(1200, 900)
    chromium.open(served.urls[0])
    chromium.wait_until("document.querySelectorAll('select.model')[1].value === 'parrot'")
    yield chromium
    assert chromium.requested and all(url.startswith(f"{served.urls[0]}/") for url in chromium.requested)
    assert chromium.console == []


def settings(browser: Browser, **values: object) -> None:
    browser.evaluate("document.getElementById('settings').open = true")
    for name, value in values.items():
        browser.type(f"#{name.replace('_', '-')}", str(value))


def ask(browser: Browser, question: str) -> None:
    browser.type("#message", question)
    browser.press("Enter")


def sent(browser: Browser) -> list[dict[str, Any]]:
    return [json.loads(body) for body in browser.posted]


@needs_chromium
def test_both_columns_stream_at_once_and_hostile_text_is_only_text(browser: Browser, served: Served) -> None:
    assert browser.text("h1") == ["my <b>run</b>"] and browser.text("h1 b") == []
    settings(browser, max_tokens=LONG, temperature=0.5, seed=3, system="Be brief.")
    browser.evaluate(WATCH)
    ask(browser, "What is <i>LoRA</i>?")
    browser.wait_until(ANSWERED)
    assert browser.evaluate("window.streamed")
    left, right = browser.text(".answer .text")
    assert left == SHOWN * LONG
    assert re.fullmatch(f"A{{{LONG}}}|B{{{LONG}}}", right)
    assert browser.text(".answer header b") == ["endless", "parrot"]
    assert all(f"max tokens reached · {LONG} tokens" in figures for figures in browser.text(".figures"))
    assert browser.text(".question") == ["What is <i>LoRA</i>?"]
    assert browser.evaluate("document.querySelectorAll('#rounds img, #rounds script, #rounds i').length") == 0

    settings(browser, max_tokens=2)
    ask(browser, "And now?")
    browser.wait_until("document.querySelectorAll('.answer').length === 4")
    browser.wait_until(ANSWERED)
    first, second = sent(browser)[:2], sent(browser)[2:]
    same = {"temperature": 0.5, "seed": 3, "stream": True, "stream_options": {"include_usage": True}}
    for requests, max_tokens in ((first, LONG), (second, 2)):
        assert sorted(body.pop("model") for body in copy.deepcopy(requests)) == ["endless", "parrot"]
        assert all({**same, "max_tokens": max_tokens}.items() <= body.items() for body in requests)
    seen = {body["model"]: [message["content"] for message in body["messages"]] for body in second}
    assert seen["endless"] == ["Be brief.", "What is <i>LoRA</i>?", HOSTILE * LONG, "And now?"]
    assert seen["parrot"] == ["Be brief.", "What is <i>LoRA</i>?", right, "And now?"]


@needs_chromium
@pytest.mark.parametrize("how", ["click", "Escape"])
def test_stop_ends_both_answers_on_the_server_too(browser: Browser, served: Served, how: str) -> None:
    settings(browser, max_tokens=CONTEXT - 100)
    ask(browser, "Write for a long time.")
    browser.wait_until(STREAMING)
    browser.click("#stop") if how == "click" else browser.press(how)
    browser.wait_until(ANSWERED, seconds=5)
    assert all(figures.startswith("stopped") for figures in browser.text(".figures"))
    assert 0 < len(browser.text(".text")[2]) < CONTEXT - 100
    end = time.monotonic() + 10
    while served.num_running():
        assert time.monotonic() < end
        time.sleep(0.05)
    settings(browser, max_tokens=2)  # what was written is kept, and the conversation continues
    ask(browser, "And now?")
    browser.wait_until("document.querySelectorAll('.answer').length === 4")
    browser.wait_until(ANSWERED)
    assert [len(body["messages"]) for body in sent(browser)] == [1, 1, 3, 3]


@needs_chromium
def test_saved_conversations_are_rows_that_training_reads(browser: Browser) -> None:
    assert browser.evaluate("document.getElementById('save').disabled")
    settings(browser, max_tokens=3, system="Be brief.")
    ask(browser, "One?")
    browser.wait_until(ANSWERED)
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.click(".copy")
    browser.wait_until("document.querySelector('.copy').textContent === 'Copied'")
    assert browser.evaluate("navigator.clipboard.readText()") == HOSTILE * 3
    browser.click("#save")
    file = browser.downloaded("chat.jsonl")
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert [row["model"] for row in rows] == ["endless", "parrot"]
    for row in rows:
        assert detect(row) == "messages" and convert(row, "messages").messages == row["messages"]
    assert [m["content"] for m in rows[0]["messages"]] == ["Be brief.", "One?", HOSTILE * 3]
    browser.click("#new")
    assert browser.text(".answer") == [] and browser.evaluate("document.getElementById('save').disabled")


@needs_chromium
@pytest.mark.parametrize(("own", "expected"), [("Be <b>brief</b>.", "Be <b>brief</b>."), ("", "")])
def test_the_system_message_of_the_training_is_set(browser: Browser, served: Served, own: str, expected: str) -> None:
    models = served.service.models
    before = models["parrot"]
    models["parrot"] = replace(before, system=own)
    try:
        browser.open(served.urls[0])
        browser.wait_until("document.querySelectorAll('select.model')[1].value === 'parrot'")
        assert browser.evaluate("document.getElementById('system').value") == expected
        assert ("is set in Settings" in browser.evaluate("document.getElementById('hint').textContent")) == bool(own)
        settings(browser, max_tokens=2)
        ask(browser, "Hello")
        browser.wait_until("!document.querySelector('.waiting') && document.querySelectorAll('.answer').length === 2")
        roles = [[message["role"] for message in body["messages"]] for body in sent(browser)]
        assert roles == [["system", "user"] if own else ["user"]] * 2  # base and adapter get the same
    finally:
        models["parrot"] = before


@needs_chromium
def test_a_refused_request_is_shown_in_its_column_and_the_chat_continues(browser: Browser) -> None:
    settings(browser, max_tokens=1)
    ask(browser, "word " * 2 * CONTEXT)
    browser.wait_until(ANSWERED)
    assert len(errors := browser.text(".answer .error")) == 2 and all(str(CONTEXT) in error for error in errors)
    ask(browser, "One?")
    browser.wait_until("document.querySelectorAll('.answer').length === 4")
    browser.wait_until(ANSWERED)
    assert len(browser.text(".answer .error")) == 2 and len(sent(browser)[-1]["messages"]) == 1
    assert all("status of 400" in line for line in browser.console) and len(browser.console) == 2
    browser.console.clear()  # the browser itself reports the status


@needs_chromium
def test_the_report_of_the_run_opens_without_scripts(browser: Browser) -> None:
    browser.click("#tabs a[href='#report']")
    browser.wait_until("document.getElementById('report-note').hidden")
    browser.wait_for_frame_text("Answers before and after")
    assert not browser.evaluate("document.getElementById('report').sandbox.length")
    browser.click("#tabs a[href='#chat']")
    browser.wait_until("document.getElementById('report-view').hidden")


@needs_chromium
def test_the_key_is_asked_for_and_never_stored(served: Served, chromium: Browser) -> None:
    browser = chromium
    browser.open(served.urls[1])
    browser.wait_until("document.getElementById('key-dialog').open")
    browser.type("#key", "wrong-key")
    browser.press("Enter")
    browser.wait_until("document.getElementById('key-note').textContent === 'This key is not accepted.'")
    browser.type("#key", KEY)
    browser.press("Enter")
    browser.wait_until("!document.getElementById('key-dialog').open")
    settings(browser, max_tokens=2)
    ask(browser, "One?")
    browser.wait_until(ANSWERED)
    assert browser.text(".answer .text")[0] == SHOWN * 2
    browser.click("#tabs a[href='#report']")
    browser.wait_until("document.getElementById('report-note').hidden")
    assert browser.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
    assert not any(KEY in url for url in browser.requested)
    assert KEY not in browser.evaluate("document.documentElement.outerHTML + document.getElementById('key').value")
    assert [line for line in browser.console if "401" not in line] == []


@needs_chromium
def test_it_fits_a_phone_and_follows_the_colors_of_the_system(browser: Browser) -> None:
    settings(browser, max_tokens=5)
    ask(browser, "word" * 100)
    browser.wait_until(ANSWERED)
    backgrounds = []
    for scheme in ("light", "dark"):
        browser.colors(scheme)
        backgrounds.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert backgrounds == ["rgb(244, 245, 243)", "rgb(18, 22, 20)"]
    columns = "getComputedStyle(document.querySelector('.answers')).gridTemplateColumns.split(' ').length"
    assert browser.evaluate(columns) == 2
    browser.resize(360, 740)
    assert browser.evaluate("document.documentElement.scrollWidth") == 360
    assert browser.evaluate(columns) == 1
    browser.evaluate("document.getElementById('settings').open = false")
    browser.click("#send")  # it is inside the window


@needs_chromium
def test_the_browser_of_these_tests_reports_scripts_and_requests(chromium: Browser, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(f"<!DOCTYPE html><body>{HOSTILE}", "utf-8")
    chromium.open((tmp_path / "page.html").as_uri())
    chromium.wait_until("document.images.length === 1")
    assert "OWNED" in chromium.console and "http://127.0.0.1:9/" in chromium.requested


# Without a browser


def test_the_policy_allows_exactly_the_one_script() -> None:
    made = chat_page("{{script}}", needs_key=False, has_report=False)
    page = made.html
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    for policy in (made.headers["Content-Security-Policy"], re.findall(r'content="(default-src[^"]*)"', page)[0]):
        assert f"script-src 'sha256-{digest}';" in policy and "default-src 'none';" in policy
    assert page.count("<h1>{{script}}</h1>") == 1  # a title is only a title
    assert "http:" not in page and "https:" not in page and not re.search(r"\son\w+=", page)
    assert "innerHTML" not in script and "eval(" not in script


def test_the_page_needs_no_key_and_is_there_only_if_asked_for(served: Served) -> None:
    for url in served.urls:
        with urllib.request.urlopen(url) as answer:
            assert answer.headers["content-type"] == "text/html; charset=utf-8"
            assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
            assert KEY not in answer.read().decode()
    said: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        said.append(message)

    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": [(b"host", b"localhost")]}
    asyncio.run(App(served.service)(scope, None, send))
    assert said[0]["status"] == 404 and b"--page" in said[1]["body"]
