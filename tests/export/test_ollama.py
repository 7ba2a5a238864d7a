"""Ollama folders: the Go template of the Modelfile gives the prompts of the chat template, or the export is refused."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import FAMILIES, chat_tokenizer, some_text
from dose import dose, full_dose_only
from gguf_models import source_of

from trillora.data.rendering.chat_templates import NAMED
from trillora.errors import TrilloraError
from trillora.export.ollama import MODELFILE, Turns, export_ollama, learn_turns
from trillora.export.source import adds_bos
from trillora.generation.prompts import Prompts
from trillora.model.loading.source import find_model, load_tokenizer

# Templates that write every message in the same way at every place.
WORK = (
    *("chatml", "chatml-marked", "llama3", "llama3-marked", "llama3-tools", "gemma", "gemma-marked", "mistral"),
    *("chatml-bare", "qwen3", "phi", "zephyr", "deepseek", "deepseek-r1"),
)


def prompts_of(name: str) -> tuple[Any, Prompts]:
    tokenizer = chat_tokenizer(name)
    return tokenizer, Prompts(tokenizer, template=FAMILIES[name].template)


def learned(tokenizer: Any, prompts: Prompts) -> tuple[Turns, str]:
    bos = tokenizer.bos_token if adds_bos(tokenizer, prompts) else ""
    stops = [tokenizer.convert_ids_to_tokens(stop) for stop in prompts.stops]
    return learn_turns(prompts, bos, stops), bos


def conversations(name: str, number: int) -> list[list[dict[str, str]]]:
    """Questions and answers, some with a system message. The white space around contents is removed: many templates
    do that, and Go's cannot."""
    rng, family = random.Random(0), FAMILIES[name]
    found = []
    for _ in range(number):
        roles = ["system"] if family.has_system and rng.random() < 0.5 else []
        roles += ["user", "assistant"] * rng.randint(0, 2) + ["user"]
        found.append([{"role": role, "content": some_text(rng, family).strip() or "fox"} for role in roles])
    return found


@pytest.mark.parametrize("name", WORK)
def test_the_learned_turns_give_the_prompts_of_the_template(name: str) -> None:
    tokenizer, prompts = prompts_of(name)
    turns, bos = learned(tokenizer, prompts)
    template = turns.go_template()
    cases = conversations(name, dose(8, 200))
    for messages in cases:
        expected = prompts.text(messages).removeprefix(bos)
        assert turns.render(messages) == expected
        assert rendered(template, messages) == expected
    assert len(cases) >= 8


def test_a_template_that_go_cannot_follow_is_refused() -> None:
    tokenizer, prompts = prompts_of("mistral-tools")  # the system message is in the last question
    with pytest.raises(TrilloraError, match="cannot follow") as raised:
        learned(tokenizer, prompts)
    assert "llama-server" in raised.value.do


def test_the_templates_that_a_recipe_can_name_work() -> None:
    for name in ("chatml", "llama3", "gemma"):
        tokenizer = chat_tokenizer(name)
        prompts = Prompts(tokenizer, template=NAMED[name][0])
        turns, bos = learned(tokenizer, prompts)
        for messages in conversations(name, 5):
            assert turns.render(messages) == prompts.text(messages).removeprefix(bos)


def test_the_modelfile_of_smollm2_has_its_default_system_message() -> None:
    tokenizer = load_tokenizer(find_model("smollm2"))
    prompts = Prompts(tokenizer, template=tokenizer.chat_template)
    turns, _ = learned(tokenizer, prompts)
    question = [{"role": "user", "content": "Hi"}]
    assert turns.render(question) == prompts.text(question)
    assert "named SmolLM" in turns.opening


def test_a_folder_for_ollama(tmp_path: Path) -> None:
    source, _ = source_of("llama", tmp_path)
    exported = export_ollama(source, tmp_path / "ollama", type="q8_0")
    assert exported.files == (MODELFILE, "model-q8_0.gguf")
    text = (tmp_path / "ollama" / MODELFILE).read_text()
    assert text.startswith("FROM ./model-q8_0.gguf\nTEMPLATE ")
    assert 'SYSTEM "You are a helpful assistant."\n' in text
    assert 'PARAMETER stop "<|im_end|>"\n' in text
    template = re.search(r'TEMPLATE """(.*?)"""\n', text, re.DOTALL)
    assert template is not None
    tokenizer = source.base.tokenizer
    for messages in conversations("chatml", 5):
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert rendered(template[1], messages) == expected


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = source_of("llama", tmp_path)
    monkeypatch.setattr(type(source.base.tokenizer), "chat_template", None, raising=False)
    monkeypatch.setitem(source.base.tokenizer.__dict__, "chat_template", None)
    with pytest.raises(TrilloraError, match="no chat template"):
        export_ollama(source, tmp_path / "ollama", type="f16")
    assert not (tmp_path / "ollama").exists()


GO = """package main

import ("encoding/json"; "io"; "os"; "text/template")

func main() {
	data, _ := io.ReadAll(os.Stdin)
	var input struct { Template string; Cases []map[string]any }
	if err := json.Unmarshal(data, &input); err != nil { panic(err) }
	parsed := template.Must(template.New("").Option("missingkey=zero").Parse(input.Template))
	for _, each := range input.Cases {
		if err := parsed.Execute(os.Stdout, each); err != nil { panic(err) }
		os.Stdout.WriteString("\\x00")
	}
}
"""


@full_dose_only
@pytest.mark.skipif(shutil.which("go") is None, reason="Go is not installed (Debian: golang-go)")
def test_go_itself_renders_the_templates(tmp_path: Path) -> None:
    program = tmp_path / "render.go"
    program.write_text(GO)
    for name in WORK:
        tokenizer, prompts = prompts_of(name)
        turns, _ = learned(tokenizer, prompts)
        cases = conversations(name, 40)
        values = [variables(messages) for messages in cases]
        given = json.dumps({"Template": turns.go_template(), "Cases": values})
        result = subprocess.run(
            ["go", "run", program], input=given, capture_output=True, text=True, check=True, cwd=tmp_path
        )
        assert result.stdout.split("\0")[:-1] == [turns.render(messages) for messages in cases]


def variables(messages: list[dict[str, str]]) -> dict[str, Any]:
    """What Ollama gives to a template."""
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    return {"System": system, "Messages": [{"Role": m["role"], "Content": m["content"]} for m in messages]}


def rendered(template: str, messages: list[dict[str, str]]) -> str:
    """Renders the part of Go's text/template that is used: range, if, else if, variables. Compared with Go itself at
    full dose."""
    parts = re.split(r"(\{\{ .*? \}\})", template)
    values: dict[str, Any] = {"$": variables(messages)}
    text, end = _block(parts, 0, values, values["$"], True)
    assert end == len(parts)
    return text


def _block(parts: list[str], at: int, values: dict[str, Any], dot: Any, is_on: bool) -> tuple[str, int]:
    """The text up to `end` or `else`, whose place is returned."""
    text = ""
    while at < len(parts):
        part = parts[at]
        action = part[3:-3] if part.startswith("{{ ") else None
        if action is None:
            text += part if is_on else ""
        elif action == "end" or action.startswith("else"):
            return text, at
        elif action == "range .Messages":
            start = at + 1
            for message in dot["Messages"]:
                more, at = _block(parts, start, values, message, is_on)
                text += more
        elif action.startswith("if "):
            done = False
            while True:
                condition = is_on and not done and _holds(action.removeprefix("else ").removeprefix("if "), values, dot)
                more, at = _block(parts, at + 1, values, dot, condition)
                text += more
                done = done or condition
                action = parts[at][3:-3]
                if action == "end":
                    break
        elif action == ".Content":
            text += dot["Content"] if is_on else ""
        elif match := re.fullmatch(r"(\$\w+) :?= (true|false)", action):
            if is_on:
                values[match[1]] = match[2] == "true"
        else:
            raise AssertionError(action)
        at += 1
    return text, at


def _holds(condition: str, values: dict[str, Any], dot: Any) -> bool:
    if match := re.fullmatch(r'eq \.Role "(\w+)"', condition):
        return bool(dot["Role"] == match[1])
    word = condition.removeprefix("not ")
    value = values[word] if word.startswith("$") else dot[word.removeprefix(".")]
    return not value if condition.startswith("not ") else bool(value)
