"""A folder for Ollama: the merged model as GGUF, and a Modelfile with the chat template that it was trained with.

    export_ollama(source, Path("runs/first/exports/ollama"), type="q8_0")
    cd runs/first/exports/ollama && ollama create my-model && ollama run my-model

Ollama writes prompts with a Go template. Without one in the Modelfile it guesses, and a model that gets other prompts
than in training answers badly. So the Go template is learned from renderings of the tokenizer's own chat template: what
it writes before and after the messages of each role. Then both are compared on other conversations, and a template that
cannot be written this way is refused.

The GGUF file is the merged model: Ollama can also add an adapter to a base, but then the result depends on which file
of the base the user has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trillora.errors import TrilloraError
from trillora.events import Listener, ignore_events
from trillora.export.gguf.write import write_model
from trillora.export.merged import writing
from trillora.export.source import Exported, ExportSource
from trillora.files.atomic import new_folder
from trillora.generation.prompts import Prompts

MODELFILE = "Modelfile"
Message = dict[str, str]
# Contents that occur nowhere else, to find them in a rendering.
_SYSTEM, _FIRST, _ANSWER, _SECOND = "Xsystem1X", "Xuser1X", "Xassistant1X", "Xuser2X"


@dataclass(frozen=True)
class Turns:
    """A chat template that writes each message as: text before it, content, text after it."""

    opening: str  # before the first message, if there is no system message
    system: tuple[str, str] | None  # before and after; None if the template has no system messages
    user: tuple[str, str]
    assistant: tuple[str, str]
    request: str  # for an answer, after the last message
    is_joined: bool = False  # a user message directly after the system message has nothing before it

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt that Ollama makes with `go_template`."""
        text = "" if any(message["role"] == "system" for message in messages) else self.opening
        for before, message in zip([None, *messages], messages, strict=False):
            start, end = getattr(self, message["role"]) or ("", "")
            joins = self.is_joined and before is not None and before["role"] == "system"
            text += ("" if joins else start) + message["content"] + end
        return text + self.request

    def go_template(self) -> str:
        """The same as Go's text/template, with the variables that Ollama gives to it."""
        opening = f"{{{{ if not .System }}}}{self.opening}{{{{ end }}}}" if self.opening else ""
        joined = "{{ $joined := false }}" if self.is_joined else ""
        start = f"{{{{ if not $joined }}}}{self.user[0]}{{{{ end }}}}" if self.is_joined else self.user[0]
        bodies = {
            "system": (self.system[0], self.system[1] + ("{{ $joined = true }}" if self.is_joined else ""))
            if self.system
            else None,
            "user": (start, self.user[1] + ("{{ $joined = false }}" if self.is_joined else "")),
            "assistant": self.assistant,
        }
        cases = [
            f'if eq .Role "{role}" }}}}{body[0]}{{{{ .Content }}}}{body[1]}{{{{ '
            for role, body in bodies.items()
            if body
        ]
        return (
            f"{joined}{opening}{{{{ range .Messages }}}}{{{{ {'else '.join(cases)}end }}}}{{{{ end }}}}{self.request}"
        )


def export_ollama(source: ExportSource, out: Path, *, type: str, listener: Listener = ignore_events) -> Exported:
    """Writes the merged model and its Modelfile to the new folder `out`."""
    modelfile = write_modelfile(source, f"model-{type}.gguf")
    with writing(out), new_folder(out) as folder:
        name, notes = write_model(source, folder, type=type, listener=listener)
        (folder / MODELFILE).write_text(modelfile, encoding="utf-8")
        num_bytes = sum(file.stat().st_size for file in folder.iterdir())
    notes = (*notes, "Ollama's template has no tools: it covers system, user and assistant messages.")
    return Exported("ollama", out, (MODELFILE, name), num_bytes, notes)


def write_modelfile(source: ExportSource, gguf: str) -> str:
    """The content of the Modelfile. Templates that Ollama cannot follow are refused."""
    if source.template is None:
        raise TrilloraError(
            "This model has no chat template, so Ollama would not know how to ask it.",
            where="the tokenizer",
            do="train with data.chat_template, or use --to gguf and run it with llama.cpp",
        )
    tokenizer, prompts = source.base.tokenizer, source.prompts
    stops = [tokenizer.convert_ids_to_tokens(stop) for stop in prompts.stops]
    bos = tokenizer.bos_token if source.adds_bos else ""
    turns = learn_turns(prompts, bos, stops)
    parts = [f"FROM ./{gguf}", f"TEMPLATE {_quoted(turns.go_template())}"]
    if default := default_system(prompts, bos, turns):
        parts.append(f"SYSTEM {_quoted(default)}")
    parts += [f"PARAMETER stop {_quoted(stop)}" for stop in stops]
    return "\n".join(parts) + "\n"


def learn_turns(prompts: Prompts, bos: str, stops: Sequence[str]) -> Turns:
    """The template as turns. `bos` is what llama.cpp puts before every prompt."""
    whole = [
        {"role": "user", "content": _FIRST},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _SECOND},
    ]
    start, middle, next_user, request = _between(_rendered(prompts, whole, bos), (_FIRST, _ANSWER, _SECOND))
    answer_end, user_start = _cut(next_user, stops, start)
    user_end, answer_start = _cut(middle, stops, "")
    if not request.startswith(user_end):
        user_end, answer_start = "", middle
    user, assistant = (user_start, user_end), (answer_start, answer_end)
    opening, request = start.removesuffix(user_start), request.removeprefix(user_end)
    system, is_joined = None, False
    with_system = _try_rendered(prompts, [{"role": "system", "content": _SYSTEM}, *whole], bos)
    if with_system is not None and _SYSTEM in with_system:
        before, after, *_ = _between(with_system, (_SYSTEM, _FIRST, _ANSWER, _SECOND))
        is_joined = not after.endswith(user_start)
        system = before, after if is_joined else after.removesuffix(user_start)
    turns = Turns(opening, system, user, assistant, request, is_joined)
    _compare(prompts, bos, turns)
    return turns


def _compare(prompts: Prompts, bos: str, turns: Turns) -> None:
    """Refuses turns that do not give the template's own prompts."""
    contents = ["What is 2 + 2?", "It's 4.", "two\nlines", "One.\n\n- a\n- b", '"quoted" {braces} <b>', "Ș and 東京"]
    talk = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    system = {"role": "system", "content": "Answer briefly.\nIn English."}
    for length in (1, 3, 5):
        for messages in (talk[:length], *([[system, *talk[:length]]] if turns.system else [])):
            expected = _try_rendered(prompts, messages, bos)
            if expected is not None and expected != turns.render(messages):
                raise _refused("it writes a message differently depending on others")
    text = [turns.opening, turns.request, *turns.user, *turns.assistant, *(turns.system or ())]
    if any("{{" in part or '"""' in part for part in text):
        raise _refused('it writes {{ or """')
    if not all(letter.isprintable() or letter in "\n\t\r" for part in text for letter in part):
        raise _refused("it writes invisible characters, which Ollama drops from a Modelfile")


def default_system(prompts: Prompts, bos: str, turns: Turns) -> str | None:
    """The system message that the template adds if there is none, if it can be separated from the rest."""
    if not turns.opening or turns.system is None or turns.is_joined:
        return None
    before, after = turns.system
    found = turns.opening.removeprefix(before).removesuffix(after)
    question = {"role": "user", "content": _FIRST}
    same = turns.render([{"role": "system", "content": found}, question])
    return found if found and same == _rendered(prompts, [question], bos) else None


def _cut(text: str, stops: Sequence[str], usual: str) -> tuple[str, str]:
    """Text between two contents as the end of one turn and the start of the next: after the stop token and its line.
    Without one, the next turn starts like `usual` as far as that fits."""
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    if ends:
        end = min(ends)
        end += len(text[end:]) - len(text[end:].lstrip("\n"))
        return text[:end], text[end:]
    common = next((n for n in range(len(usual), 0, -1) if text.endswith(usual[-n:])), 0)
    return text[: len(text) - common], text[len(text) - common :]


def _between(text: str, contents: Sequence[str]) -> list[str]:
    parts = []
    for content in contents:
        before, found, text = text.partition(content)
        if not found or content in text:
            raise _refused("it leaves out messages or repeats them")
        parts.append(before)
    return [*parts, text]


def _rendered(prompts: Prompts, messages: Sequence[Message], bos: str) -> str:
    return prompts.text(messages).removeprefix(bos)


def _try_rendered(prompts: Prompts, messages: Sequence[Message], bos: str) -> str | None:
    """None if the template refuses such a conversation."""
    try:
        return _rendered(prompts, messages, bos)
    except TrilloraError:
        return None


def _quoted(text: str) -> str:
    return f'"""{text}"""' if "\n" in text or '"' in text else f'"{text}"'


def _refused(why: str) -> TrilloraError:
    return TrilloraError(
        f"Ollama's templates cannot follow this chat template: {why}.",
        where="the chat template",
        do="use --to gguf and run it with llama.cpp (llama-server --jinja), which uses the template itself; or train "
        "with a simpler data.chat_template, such as chatml",
    )
