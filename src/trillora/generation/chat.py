"""A chat in the terminal. A line is a message or a command; each answer is streamed and sees all messages before it.

    > /compare
    Base and adapter answer every message. /compare again ends it.
    > What is LoRA?
    base                  │ adapter
    A radio technology.   │ Low-rank adaptation.

Base and adapter each see their own answers. They sample with the same seed, so only the adapter makes a difference.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from trillora.engine.sampling import Sampling
from trillora.errors import TrilloraError, as_error, nearest
from trillora.events import Event, Listener, Progress
from trillora.files.atomic import write_file
from trillora.files.user_path import user_path
from trillora.generation.columns import column_width, side_by_side
from trillora.generation.generator import Generator
from trillora.generation.prompts import Message
from trillora.generation.system_message import trained_with

GREETING = "Type a message. /help lists the commands, /quit exits."
BASE, ADAPTER = "base", "adapter"
COMMANDS = {
    "/compare": ("", "base and adapter answer every message; the same command ends it"),
    "/system": ("[TEXT]", "sets the system message, or removes it, and clears the conversation"),
    "/save": ("FILE", "writes the conversation as JSONL for `trillora train`; /save! replaces the file"),
    "/reset": ("", "clears the conversation"),
    "/help": ("", "shows this list"),
    "/quit": ("", "exits"),
}


def converse(
    generator: Generator,
    ask: Callable[[], str],
    say: Callable[[str], None],
    *,
    max_tokens: int,
    sampling: Sampling,
    width: Callable[[], int | None] = lambda: None,
) -> None:
    """Chats until `/quit`, the end of input or an interrupt while it waits for a line.

    A line that `ask` refuses with a `TrilloraError` is not sent. `width`: the terminal's, or None in a pipe."""
    if not generator.prompts.has_template:
        raise TrilloraError(
            "This model has no chat template: it can continue texts, but not chat.",
            do="use trillora generate, or the chat (“instruct”) version of the model",
        )
    chat = _Chat(generator, say, width, max_tokens, sampling, system=generator.system)
    say(f"{GREETING}\n{_how(sampling)}\n")
    if chat.system:
        say(f"{trained_with(chat.system)} It is set here too; /system removes it.\n")
    generator.listener = _compilations(say)
    try:
        while chat.is_open:
            try:
                chat.read(ask().strip())
            except TrilloraError as error:
                say(f"{error}\n")
    except (EOFError, KeyboardInterrupt):
        say("\n")
    say("Bye.\n")


def _how(sampling: Sampling) -> str:
    if not sampling.temperature:
        return "Temperature 0: the most likely token is taken each time, so answers are always the same."
    shown = f"Temperature {float(sampling.temperature):g}"
    return f"{shown}: answers are sampled and differ. --temperature 0 takes the most likely."


def _compilations(say: Callable[[str], None]) -> Listener:
    """Says why nothing is written for a while: longer conversations need programs of their own."""

    def listen(event: Event) -> None:
        if isinstance(event, Progress) and not event.done and "prompts" in event.label:
            say(f"({event.label}, once …)\n")

    return listen


@dataclass
class _Chat:
    generator: Generator
    say: Callable[[str], None]
    width: Callable[[], int | None]
    max_tokens: int
    sampling: Sampling
    is_open: bool = True
    system: str = ""
    turns: dict[str, list[Message]] = field(default_factory=lambda: {ADAPTER: []})  # with BASE too if both answer

    def read(self, line: str) -> None:
        """Carries out one line. Raises a `TrilloraError` that says why not, and then nothing has changed."""
        if not line.startswith("/") or line.startswith("//"):  # "//" is a message that begins with a slash
            if message := line.removeprefix("/") if line.startswith("//") else line:
                self._answer(message)
            return
        word, _, rest = line.partition(" ")
        name, rest = word.removesuffix("!"), rest.strip()
        if name not in COMMANDS or (word != name and name != "/save"):
            meant = nearest(name.lower(), COMMANDS)
            hint = f"did you mean {meant}? " if meant else ""
            do = f"{hint}/help lists the commands; to send a message that begins with a slash, write two slashes"
            raise TrilloraError(f"Unknown command '{word}'.", do=do)
        if rest and not COMMANDS[name][0]:
            raise TrilloraError(f"{name} takes no text after it.", do=f"write {name} alone")
        match name:
            case "/compare":
                self._compare()
            case "/system":
                self._set_system(rest)
            case "/save":
                self._save(rest, replace=word != name)
            case "/reset":
                self._clear()
                self.say("Conversation cleared.\n")
            case "/help":
                for command, (argument, effect) in COMMANDS.items():
                    self.say(f"  {f'{command} {argument}'.strip():<16} {effect}\n")
            case "/quit":
                self.is_open = False

    def _clear(self) -> None:
        self.turns = {name: [] for name in self.turns}

    def _compare(self) -> None:
        if not self.generator.adapter:
            what = "There is no adapter here, so there is nothing to compare."
            raise TrilloraError(what, do="open a run with an adapter, without --base")
        if BASE in self.turns:
            del self.turns[BASE]
            self.say("Only the adapter answers.\n")
        else:
            self.turns = {BASE: list(self.turns[ADAPTER]), ADAPTER: self.turns[ADAPTER]}
            self.say("Base and adapter answer every message. /compare again ends it.\n")

    def _set_system(self, text: str) -> None:
        question: Message = {"role": "user", "content": "question"}
        changes = ""
        if text:
            encode = self.generator.encode
            if encode([{"role": "system", "content": text}, question]) == encode([question]):
                changes = " The chat template of this model ignores it."
        self.system = text
        self._clear()
        self.say(f"System message {'set' if text else 'removed'}, conversation cleared.{changes}\n")

    def _save(self, name: str, *, replace: bool) -> None:
        if not name:
            raise TrilloraError("/save needs the name of a file.", do="write, for example, /save chat.jsonl")
        rows = {model: self._messages(turns) for model, turns in self.turns.items() if turns}
        if not rows:
            raise TrilloraError("There is nothing to save yet.", do="ask something first")
        file = user_path(name, where="/save")
        if os.path.lexists(file) and not replace:
            raise TrilloraError("This file exists.", where=str(file), do=f"write /save! {name} to replace it")
        notes = {model: {"model": model} if len(self.turns) > 1 else {} for model in rows}
        lines = [json.dumps({"messages": rows[model], **notes[model]}, ensure_ascii=False) + "\n" for model in rows]
        try:
            write_file(file, "".join(lines))
        except OSError as error:
            raise as_error(error) from None
        self.say(f"{len(rows)} conversation{'s' if len(rows) > 1 else ''} written to {file}\n")

    def _messages(self, turns: list[Message]) -> list[Message]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *turns]

    def _answer(self, line: str) -> None:
        """Streams the answers and adds the message with each of them to its conversation. An interrupt ends them."""
        question: Message = {"role": "user", "content": line}
        pieces: dict[str, list[str]] = {name: [] for name in self.turns}
        streams = {
            name: _recorded(self._stream([*turns, question], adapted=name == ADAPTER), pieces[name])
            for name, turns in self.turns.items()
        }
        try:
            self._show(streams)
        except KeyboardInterrupt:
            self.say("\n(stopped)\n")
        for name in self.turns:
            if (answer := "".join(pieces[name])).strip():
                self.turns[name] = [*self.turns[name], question, {"role": "assistant", "content": answer}]
            else:
                who = f" of the {name}" if len(streams) > 1 else ""
                self.say(f"(The answer{who} is empty; the message is not part of the conversation.)\n")

    def _show(self, streams: dict[str, Iterator[str]]) -> None:
        if len(streams) > 1 and (width := column_width(self.width(), len(streams))) is not None:
            side_by_side(streams, width, self.say)
            return
        for name, stream in streams.items():
            if len(streams) > 1:
                self.say(f"[{name}]\n")
            for piece in stream:
                self.say(piece)
            self.say("\n")

    def _stream(self, turns: list[Message], *, adapted: bool) -> Iterator[str]:
        messages = self._messages(turns)
        longest = self.generator.longest
        if longest is not None and (length := len(self.generator.encode(messages, adapted=adapted))) >= longest:
            do = "clear it with /reset; save it before with /save FILE" if len(turns) > 1 else "write a shorter message"
            raise TrilloraError(
                f"The conversation has {length:,} tokens with this message; the model's limit, with the answer, is "
                f"{longest:,}.",
                do=do + (", or a shorter system message" if self.system else ""),
            )
        return self.generator.stream(messages, max_tokens=self.max_tokens, sampling=self.sampling, adapted=adapted)


def _recorded(stream: Iterator[str], pieces: list[str]) -> Iterator[str]:
    for piece in stream:
        pieces.append(piece)
        yield piece
