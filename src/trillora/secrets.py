"""Secrets taken out of whatever is written down or sent away: reports, trackers, logs.

Three ways to know one: it looks like the keys that services give out; it stands under a name like `password`; it is
the value of such a variable of this process's environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

MASK = "•••"
SHORTEST = 8  # characters of a text that could hold a key at all

# Texts are strangers' and long: repetitions that may fail after a long way are bounded, so that time stays linear.
_SHAPES = re.compile(
    r"""(?<![A-Za-z0-9])(?:
      hf_[A-Za-z0-9]{8,} | hf_(?:oauth|jwt)_[\w.-]{8,}        # Hugging Face
    | sk-[A-Za-z0-9_-]{12,} | sk_(?:live|test)_\w{8,}         # OpenAI, Anthropic, Stripe
    | wandb_v\d_\w{12,} | local-[0-9a-f]{40}                  # Weights & Biases
    | gh[oprsu]_[A-Za-z0-9]{16,} | github_pat_\w{16,} | glpat-[\w-]{12,}
    | xox[abeoprs]-[\w-]{10,} | npm_[A-Za-z0-9]{20,} | pypi-[\w-]{20,}
    | (?:AKIA|ASIA)[0-9A-Z]{16} | AIza[\w-]{30,} | ya29\.[\w.-]{16,} | GOCSPX-[\w-]{16,}
    | eyJ[\w-]{8,2000}\.[\w-]{8,4000}\.[\w-]*               # JSON web tokens
    )""",
    re.VERBOSE,
)
_IN_URL = re.compile(r"(://)[^\s/@\"'<>]+@")  # user and password
_IN_QUERY = re.compile(
    r"([?&][\w.%-]{0,40}(?:token|signature|sig|key|secret|password|credential)[\w.%-]{0,40}=)[^&\s\"'<>#]+",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b((?:bearer|basic)\s{1,8})[A-Za-z0-9._~+/=-]{12,}", re.IGNORECASE)
_PEM = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
# A bare key of 40 hexadecimal digits is also what a git commit looks like: what says that it is one, stands before it.
_HEX40 = re.compile(r"(?<![0-9A-Za-z])[0-9a-fA-F]{40}(?![0-9A-Za-z])")
_COMMIT_BEFORE = re.compile(r"(?:revision|commit|sha\w*|digest|hash|snapshots/|@)\W{0,4}$", re.IGNORECASE)
_DIGEST_NAME = re.compile(r"revision|commit|sha|digest|hash|identity", re.IGNORECASE)
# `num_tokens`, `eos_token`, `tokenizer` and `key_value` are no secrets.
_SECRET_NAME = re.compile(
    r"(?:^|[_.\-\s])(?:(?:hf|hub|auth|access|api|bearer|refresh|session|github|wandb|secret)[_-]?token|^token"
    r"|api[_-]?key|access[_-]?key(?:[_-]?id)?|private[_-]?key|wandb[_-]?key|secret(?:[_-]?key)?|client[_-]?secret"
    r"|password|passwd|pwd|passphrase|credentials?|authorization)$",
    re.IGNORECASE,
)
_SETTING = re.compile(r"(?:^|(?<=[{,\s]))[\"']?(?P<name>[\w.-]+)[\"']?[ \t]*[:=][ \t]*", re.MULTILINE)
_LINE_VALUE = re.compile(r".+?(?=[ \t]+#|[ \t]*$)", re.MULTILINE)
_INLINE_VALUE = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^,}\n]+")
_NOTHING = re.compile(r"(?:null|~|true|false|auto)?\s*(?:[,}#\n]|\Z)")
_SECRET_VARIABLE = re.compile(r"TOKEN|API_?KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|PRIVATE_KEY|ACCESS_KEY")


def secrets_of_environment(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Values of variables named like secrets, longest first, but for those that are words, numbers or paths."""
    variables = os.environ if environment is None else environment
    values = (value.strip() for name, value in variables.items() if _SECRET_VARIABLE.search(name.upper()))
    telling = {v for v in values if len(v) >= SHORTEST and not v.isalpha() and not v.isdigit() and "/" not in v[:1]}
    return tuple(sorted(telling, key=len, reverse=True))


def mask_secrets(text: str, known: Iterable[str] = ()) -> str:
    """The text with everything that looks like a key, or is one of the known ones, replaced."""
    for secret in known:
        text = text.replace(secret, MASK)
    if len(text) < SHORTEST:
        return text
    text = _SHAPES.sub(MASK, text)
    text = _PEM.sub(rf"\1{MASK}\2", text)
    text = _IN_URL.sub(rf"\1{MASK}@", text)
    text = _IN_QUERY.sub(rf"\1{MASK}", text)
    text = _BEARER.sub(rf"\1{MASK}", text)
    return _HEX40.sub(_mask_unless_commit, text)


def mask_settings(text: str, known: Iterable[str] = ()) -> str:
    """A settings file (YAML, JSON, NAME=value) without secrets, also those told by their name alone."""
    parts, end = [], 0
    for setting in _SETTING.finditer(text):
        start = setting.end()
        if start < end or not _is_secret_name(setting["name"]) or _NOTHING.match(text, start):
            continue
        starts_line = not text[: setting.start()].rpartition("\n")[2].strip()
        value = (_LINE_VALUE if starts_line else _INLINE_VALUE).match(text, start)
        if value:
            parts += [text[end:start], MASK]
            end = value.end()
    return mask_secrets("".join([*parts, text[end:]]), known)


def mask_values(value: Any, known: Iterable[str] = (), name: str = "") -> Any:
    """Plain values, as of JSON, without secrets; `name` is the key they stand under."""
    match value:
        case str():
            if len(value) == 40 and _DIGEST_NAME.search(name) and _HEX40.fullmatch(value):
                return value
            return MASK if value and _is_secret_name(name) else mask_secrets(value, known)
        case Mapping():
            inside = "identity." if name == "identity" else ""
            return {
                mask_secrets(str(key), known): mask_values(inner, known, f"{inside}{key}")
                for key, inner in value.items()
            }
        case list() | tuple():
            return [mask_values(inner, known, name) for inner in value]
        case int() | float() if not isinstance(value, bool) and _is_secret_name(name):
            return MASK
    return value


def _is_secret_name(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None


def _mask_unless_commit(found: re.Match[str]) -> str:
    before = found.string[max(found.start() - 16, 0) : found.start()]
    return found.group() if _COMMIT_BEFORE.search(before) else MASK
