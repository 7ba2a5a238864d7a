"""Checks of a tokenizer and its chat template against those that were trained with.

The expected tokenizer is the base's, with the tokens that the run added. The expected template is the recipe's, or else
the tokenizer's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trillora.certify.certificate import Check, Status
from trillora.certify.gguf_file import GgufFile
from trillora.certify.subject import Subject
from trillora.data.rendering.render import TEMPLATE_DATE
from trillora.files.digests import text_digest
from trillora.files.read_json import read_text
from trillora.generation.prompts import Prompts
from trillora.model.adapters import TEMPLATE_FILE
from trillora.model.loading.description import stop_tokens
from trillora.model.loading.digest import tokenizer_digest
from trillora.model.loading.growth import num_ids
from trillora.model.loading.source import load_config, load_tokenizer

if TYPE_CHECKING:
    from trillora.model.loading.types import Tokenizer

SAMPLES = (
    "Hello, world! 1234567890 3.14",
    "  two spaces,\ttab\nand a new line\n\n",
    "def f(x):\n    return x ** 2  # naïve café",
    "Привет, мир. 你好,世界。 مرحبا 🙂",
    "<|im_start|>user\nHi<|im_end|> <s></s> <|endoftext|>",
)
QUESTION = "What is the capital of France?"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
# Tokens that llama.cpp takes for the end of an answer by their text, whatever the file's ids are.
KNOWN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>"),
    *("<|end_of_text|>", "<turn|>"),
)
DO = "write the tokenizer of the run again: export it again, or copy the base's tokenizer files"


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def check_tokenizer(subject: Subject) -> Iterator[Check]:
    """For an adapter or a merged model."""
    yield from _of_the_run(subject)
    folder, base = subject.folder, subject.opened.tokenizer
    template = subject.template
    own = load_tokenizer(folder) if has_tokenizer(folder) else None
    if own is None:
        status: Status = "failed" if subject.kind == "merged" else "skipped"
        what = "The folder has no tokenizer." if subject.kind == "merged" else "The base's own tokenizer is used."
        yield Check("tokenizer", "tokens", status, what, do=DO if subject.kind == "merged" else "")
        yield from _template_file(folder, template)
    else:
        yield _special_tokens(own, base)
        yield _same_tokens(own, base)
        yield _same_template(own.get_chat_template() if own.chat_template else None, template, "chat template")
        yield from _double_start(subject, own)
    yield from _stop(subject, own or base)


def _of_the_run(subject: Subject) -> Iterator[Check]:
    recorded = None if subject.manifest is None else subject.manifest.identity.get("tokenizer")
    if recorded is None:
        return
    if recorded == tokenizer_digest(subject.opened.tokenizer):
        what = "The base's tokenizer and chat template have the digest that the run recorded."
        yield Check("tokenizer", "same as in training", "ok", what)
        return
    what = "The base's tokenizer or chat template is not the one that the run was trained with."
    do = "use the same model and revision as the run; if its files have changed, download them again"
    yield Check("tokenizer", "same as in training", "failed", what, do=do)


def _special_tokens(own: Tokenizer, base: Tokenizer) -> Check:
    wrong = []
    for name in ("bos", "eos", "pad", "unk"):
        now, before = ((getattr(each, f"{name}_token"), getattr(each, f"{name}_token_id")) for each in (own, base))
        if now != before:
            wrong.append(f"{name} is {_shown(now)} instead of {_shown(before)}")
    if wrong:
        return Check("tokenizer", "special tokens", "failed", f"{'; '.join(wrong)}.", len(wrong), 0, DO)
    what = f"BOS {own.bos_token!r}, EOS {own.eos_token!r} and padding {own.pad_token!r} are as in training."
    return Check("tokenizer", "special tokens", "ok", what, 0, 0)


def _shown(token: tuple[str | None, int | None]) -> str:
    return "missing" if token[0] is None else f"{token[0]!r} ({token[1]})"


def _same_tokens(own: Tokenizer, base: Tokenizer) -> Check:
    wrong = []
    for text in (*SAMPLES, " ".join(map(str, getattr(base, "new_tokens", ())))):
        for special in (True, False):
            now, before = (each(text, add_special_tokens=special)["input_ids"] for each in (own, base))
            if now != before:
                wrong.append(f"{text[:30]!r} is {now[:6]}… instead of {before[:6]}…")
            elif (read := own.decode(now)) != (expected_text := base.decode(before)):
                wrong.append(f"{text[:30]!r} is read back as {read[:30]!r} instead of {expected_text[:30]!r}")
    added, expected = ({id_: token.content for id_, token in each.added_tokens_decoder.items()} for each in (own, base))
    wrong += [f"token {id_} is {added.get(id_)!r} instead of {expected.get(id_)!r}" for id_ in _differ(added, expected)]
    if wrong:
        return Check("tokenizer", "tokens", "failed", f"{'; '.join(wrong[:3])}.", len(wrong), 0, DO)
    what = f"{len(SAMPLES)} texts have the same tokens as in training, and {len(added):,} added tokens are equal."
    return Check("tokenizer", "tokens", "ok", what, 0, 0)


def _differ(one: dict[int, str], other: dict[int, str]) -> list[int]:
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def _same_template(own: str | None, expected: str | None, name: str) -> Check:
    if own == expected:
        what = "There is none, as in training." if own is None else "It is identical to the template used in training."
        return Check("tokenizer", name, "ok", what)
    if own is None or expected is None:
        what = "It is missing." if own is None else "There is one, but training used none."
    else:
        at = next(
            (i for i, (a, b) in enumerate(zip(own, expected, strict=False)) if a != b), min(len(own), len(expected))
        )
        what = f"It differs from the one of training, at character {at + 1:,}: {own[at : at + 30]!r}."
    return Check("tokenizer", name, "failed", what, do=DO)


def _template_file(folder: Path, expected: str | None) -> Iterator[Check]:
    """An adapter without a tokenizer may have a template of its own."""
    file = folder / TEMPLATE_FILE
    if file.is_file():
        yield _same_template(read_text(file, do=DO), expected, "chat template")


def check_template_of_run(subject: Subject) -> Iterator[Check]:
    """The recipe's own template has the digest that the run recorded."""
    manifest, record = subject.manifest, subject.stage_record
    recorded = None if manifest is None or record is None else manifest.identity.get(f"{record.name} chat template")
    if recorded is None or subject.stage is None or subject.stage.data.chat_template is None:
        return
    is_same = text_digest(subject.template or "") == recorded
    what = "The recipe's chat template is " + ("as in training." if is_same else "not the one of training.")
    yield Check("tokenizer", "template of the recipe", "ok" if is_same else "failed", what, do="" if is_same else DO)


def _double_start(subject: Subject, own: Tokenizer) -> Iterator[Check]:
    """A template that writes BOS, with a tokenizer that adds another."""
    if own.bos_token_id is None or not own.chat_template or subject.template is None:
        return
    own_prompts = Prompts(own, template=own.get_chat_template(), template_date=TEMPLATE_DATE)
    counts = []
    for each, prompts in ((own, own_prompts), (subject.opened.tokenizer, subject.prompts)):
        ids = prompts.encode(QUESTION)
        again = each(each.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))["input_ids"]
        counts.append(tuple(_num_leading(row, own.bos_token_id) for row in (ids, again)))
    (written, again), (before, again_before) = counts
    if written > 1 or again > max(again_before, 1):
        what = f"A conversation starts with {max(written, again)} BOS tokens; training had {before}."
        yield Check("tokenizer", "one BOS", "failed", what, max(written, again), 1, DO)
    elif again > 1:
        what = "The template writes BOS and the tokenizer adds one to plain text, as in the base."
        do = "pass add_special_tokens=False if you tokenize a rendered conversation yourself"
        yield Check("tokenizer", "one BOS", "ok", what, written, 1, do)
    else:
        yield Check("tokenizer", "one BOS", "ok", f"A conversation starts with {written} BOS token.", written, 1)


def _num_leading(ids: list[int], token: int) -> int:
    return next((n for n, id_ in enumerate(ids) if id_ != token), len(ids))


def _stop(subject: Subject, tokenizer: Tokenizer) -> Iterator[Check]:
    """The token that the template writes after an answer must end generation."""
    is_merged = subject.kind == "merged"
    folder = subject.folder if is_merged else subject.opened.folder
    ends = stop_tokens(folder, load_config(folder))
    eos = subject.opened.tokenizer.eos_token_id
    wanted = set(subject.prompts.template_stops) or ({int(eos)} if eos is not None else set())
    if not wanted:
        yield Check("tokenizer", "stop token", "skipped", "The tokenizer has no EOS and the template no stop token.")
        return
    names = ", ".join(f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in sorted(wanted))
    if wanted <= ends:
        yield Check("tokenizer", "stop token", "ok", f"{names}, which ends an answer in training, ends generation.")
        return
    status: Status = "failed" if is_merged else "warning"
    what = f"{names} ends an answer in training, but generation_config.json does not stop there."
    do = f"add it to eos_token_id of generation_config.json, or pass eos_token_id={sorted(wanted | ends)} to generate"
    yield Check("tokenizer", "stop token", status, what, do=do)


# ---- GGUF and Ollama


def check_gguf_tokenizer(subject: Subject, model: GgufFile) -> Iterator[Check]:
    tokenizer, template = subject.opened.tokenizer, subject.template
    tokens = model.value("tokenizer.ggml.tokens") or []
    wrong = []
    for name, expected in (("bos", tokenizer.bos_token_id), ("eos", tokenizer.eos_token_id)):
        found = model.value(f"tokenizer.ggml.{name}_token_id")
        if expected is not None and found != expected:
            wrong.append(f"{name} is {'missing' if found is None else found} instead of {expected}")
    known = tokenizer.convert_ids_to_tokens(list(range(min(num_ids(tokenizer), len(tokens)))))
    different = [i for i, token in enumerate(known) if token is not None and token != tokens[i]]
    if len(tokens) < num_ids(tokenizer):
        wrong.append(f"it has {len(tokens):,} tokens instead of {num_ids(tokenizer):,}")
    if different:
        first = different[0]
        wrong.append(f"{len(different):,} tokens differ, first {first}: {tokens[first]!r} instead of {known[first]!r}")
    if wrong:
        yield Check("tokenizer", "tokens", "failed", f"{'; '.join(wrong)}.", len(wrong), 0, DO)
    else:
        yield Check("tokenizer", "tokens", "ok", f"{len(tokens):,} tokens, BOS and EOS are as in training.", 0, 0)
    yield _same_template(model.text("tokenizer.chat_template"), template, "chat template")
    yield from _gguf_stop(subject, model)


def _gguf_stop(subject: Subject, model: GgufFile) -> Iterator[Check]:
    ends = {model.value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    for stop in subject.prompts.template_stops:
        text = subject.opened.tokenizer.convert_ids_to_tokens(stop)
        if stop in ends or text in KNOWN_ENDS:
            what = f"{text!r}, which ends an answer in training, ends generation."
            yield Check("tokenizer", "stop token", "ok", what)
        else:
            what = f"{text!r} ends an answer in training, but the file names {sorted(filter(None, ends))} as its ends."
            yield Check("tokenizer", "stop token", "failed", what, do="write tokenizer.ggml.eot_token_id; export again")


def check_modelfile(subject: Subject) -> Iterator[Check]:
    """Ollama's Modelfile: the file that it names, a template and the stop of the template."""
    text = read_text(subject.folder / "Modelfile", do="export it again: trillora export RUN --to ollama")
    source = re.search(r"^FROM\s+(\S+)", text, re.MULTILINE)
    if source is None or not (subject.folder / source[1]).is_file():
        what = f"FROM names {source[1] if source else 'nothing'}, which is not here."
        yield Check("servers", "Modelfile", "failed", what, do="export it again: trillora export RUN --to ollama")
        return
    template, tokenizer = subject.template, subject.opened.tokenizer
    stops = re.findall(r'^PARAMETER\s+stop\s+"?(.*?)"?\s*$', text, re.MULTILINE)
    ends = map(tokenizer.convert_ids_to_tokens, subject.prompts.template_stops)
    missing = [name for name in ends if name not in stops]
    if template and "TEMPLATE" not in text:
        what = "There is no TEMPLATE, so Ollama may choose another one by its similarity."
        yield Check("servers", "Modelfile", "failed", what, do="export it again: trillora export RUN --to ollama")
    elif missing:
        what = f"{missing[0]!r} ends an answer in training, but PARAMETER stop does not name it."
        yield Check("servers", "Modelfile", "failed", what, do=f'add the line: PARAMETER stop "{missing[0]}"')
    else:
        yield Check("servers", "Modelfile", "ok", f"FROM, TEMPLATE and {len(stops)} stops are there.")
