"""New tokens for a tokenizer, from the recipe (`tokens: ["<tool>", "</tool>"]`).

    tokenizer = load_tokenizer(folder)          # 49,152 tokens
    grow(tokenizer, ("<tool>", "</tool>"))      # "<tool>" is one token now: 49152, and "</tool>" is 49153
    trained_tokens(tokenizer, ("<tool>", "</tool>"), existing=("<|im_end|>",))  # ids (2, 49152, 49153)

The new tokens are ordinary text, not special tokens: rows may contain them, answers show them, and the model learns to
write them. Their embeddings belong to the adapter (`model/parts/token_rows.py`), so the base model stays as it is.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trillora.errors import TrilloraError
from trillora.files.bounded import read_bounded
from trillora.files.read_json import parse_json
from trillora.model.lora_spec import LoraSpec

if TYPE_CHECKING:
    from trillora.model.loading.types import Tokenizer

_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_FILES = (
    *("tokenizer.json", _CONFIG, _TEMPLATE, "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tekken.json"),
)
_VOCABULARIES = (".model", ".tiktoken")
_ABOUT_LOADING = ("is_local", "local_files_only", "name_or_path")
_MAX_BYTES = 64 << 20  # of a file; the largest known has 35 MB


def grow(tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    """Adds each text as one token. `tokenizer.model_vocab_size` follows: the adapter has embeddings for them."""
    if not tokens:
        return
    from tokenizers import AddedToken

    for number, text in enumerate(tokens):
        if (known := _single_token(tokenizer, text)) is not None:
            raise TrilloraError(
                f"The tokenizer already has {text!r} as one token, number {known}.",
                where=f"tokens[{number}]",
                do="remove it from tokens; to train its embedding, add it to lora.train_tokens",
            )
    before = num_ids(tokenizer)
    stored = tokenizer.model_vocab_size
    # Not normalized: a tokenizer that changes the case or the accents of text must still find these.
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in tokens])
    ids = tokenizer.convert_tokens_to_ids(list(tokens))
    found = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in tokens]
    if ids != list(range(before, before + len(tokens))) or any(
        id_ not in row for id_, row in zip(ids, found, strict=True)
    ):
        raise TrilloraError(
            "This tokenizer cannot take new tokens: it does not give them the numbers after its last one.",
            where="tokens",
            do="remove tokens, or use a model with a tokenizer.json of the usual kind",
        )
    tokenizer.new_tokens = tuple(tokens)  # the encoder of rows and prompts treats them as text
    tokenizer.stored_vocab_size = stored
    tokenizer.model_vocab_size = None if stored is None else max(stored, num_ids(tokenizer))


def trained_tokens(tokenizer: Tokenizer, new: Sequence[str], existing: Iterable[str | int]) -> tuple[int, ...]:
    """The ids of the tokens whose embeddings are trained, in order: the new ones, and the existing ones that the recipe
    names by text or id. A tokenizer may have had more tokens than the model before it was grown: these are included,
    because ids have no gaps."""
    ids = set()
    for number, token in enumerate(existing):
        id_ = token if isinstance(token, int) else _single_token(tokenizer, token)
        if id_ is None or not 0 <= id_ < num_ids(tokenizer):
            raise TrilloraError(
                f"The tokenizer has no token {token!r}.",
                where=f"lora.train_tokens[{number}]",
                do="use the text of one token, or its number; a new token belongs in tokens",
            )
        ids.add(id_)
    if new:
        first_new = num_ids(tokenizer) - len(new)
        stored = tokenizer.stored_vocab_size
        ids.update(range(first_new if stored is None else min(first_new, stored), num_ids(tokenizer)))
    return tuple(sorted(ids))


def check_rows(tokenizer: Tokenizer, spec: LoraSpec, where: str, tokens: Sequence[str] | None = None) -> None:
    """Refuses an adapter for a tokenizer with other new tokens: one number would be two texts, or have no embedding.
    `tokens`: the new tokens of the adapter's run, if it is known."""
    new = getattr(tokenizer, "new_tokens", ())
    if tokens is not None and list(tokens) != list(new):
        shown = [", ".join(list(each)[:8]) or "none" for each in (tokens, new)]
        raise TrilloraError(
            f"The adapter has other new tokens ({shown[0]}) than the tokenizer ({shown[1]}).",
            where=where,
            do="use it with the run that trained it",
        )
    last, size = max(spec.tokens.ids, default=-1) if spec.tokens is not None else -1, num_ids(tokenizer)
    if last >= size:
        raise TrilloraError(
            f"The adapter has trained token {last}, but the last one of the tokenizer is {size - 1}.",
            where=where,
            do="give the run that trained it, which has the text of its new tokens; or merge it with PEFT",
        )
    if new and size > max(last + 1, spec.num_tokens, tokenizer.stored_vocab_size or 0):
        raise TrilloraError(
            f"The adapter has no embeddings for the new tokens of the run: {', '.join(new[:8])}.",
            where=where,
            do="use it with its base model, not with this run",
        )


def num_ids(tokenizer: Tokenizer) -> int:
    """The number after the last token. There may be fewer tokens, if some numbers are not used."""
    return max(tokenizer.get_vocab().values()) + 1


def tokenizer_files(tokenizer: Tokenizer, folder: Path) -> dict[str, bytes]:
    """The files of a tokenizer next to an adapter: those in the model's folder, or new ones if the tokenizer
    has grown. PEFT grows the base model itself if it sees more tokens there."""
    if getattr(tokenizer, "new_tokens", ()):
        with tempfile.TemporaryDirectory() as written:
            tokenizer.save_pretrained(written)
            files = _read_all(Path(written))
    else:
        files = _read_all(folder)
    if isinstance(tokenizer.chat_template, str):
        files[_TEMPLATE] = tokenizer.chat_template.encode()
    if _CONFIG in files:
        files[_CONFIG] = _portable(files[_CONFIG], folder / _CONFIG)
    return files


def _read_all(folder: Path) -> dict[str, bytes]:
    found = (file for file in sorted(folder.iterdir()) if file.is_file())
    kept = [file for file in found if file.name in _FILES or file.suffix in _VOCABULARIES]
    return {file.name: read_bounded(file, _MAX_BYTES) for file in kept}


def _portable(config: bytes, file: Path) -> bytes:
    """tokenizer_config.json for other machines and versions: without what transformers adds when it loads a local
    folder, and with the class name that older versions know too."""
    content = parse_json(config, dict[str, Any], where=str(file), do="download the file again", allow_infinity=True)
    kept = {key: value for key, value in content.items() if key not in _ABOUT_LOADING}
    if kept.get("tokenizer_class") == "TokenizersBackend":
        kept["tokenizer_class"] = "PreTrainedTokenizerFast"
    return config if kept == content else (json.dumps(kept, indent=2, ensure_ascii=False) + "\n").encode()


def _single_token(tokenizer: Tokenizer, text: str) -> int | None:
    """The token that this text is, if it is exactly one."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1 or (ids[0] == tokenizer.unk_token_id and text != tokenizer.unk_token):
        return None
    return int(ids[0])
