"""Removes secrets from everything that is shown, saved or sent: messages, reports, logs, trackers.

A secret is recognized by its shape (the keys that services issue), by its name (`password: …`), or because an
environment variable with such a name has this value. URLs lose their credentials, query and fragment:

    mask_secrets("login with hf_abcdefgh12345")     ->  "login with •••"
    mask_settings("wandb_key: 12ab\nsteps: 5")      ->  "wandb_key: •••\nsteps: 5"
    mask_values({"password": "x", "num_tokens": 3}) ->  {"password": "•••", "num_tokens": 3}
    without_secrets("s3://me:pw@host/runs?sig=abc") ->  "s3://host/runs"
    mask_message("no file s3://me:p/w@host/x")      ->  "no file s3://•••@host/x"

Every message passes `mask_message` when it is printed. A value that is quoted in part is masked before it is cut.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

MASK = "•••"
SHORTEST = 8  # characters; a shorter text cannot contain a key

# The texts are untrusted and may be long. Repetitions that can fail late are bounded, so that matching takes linear
# time.
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
# User and password. Text after a colon that is not a port is a password, which may contain any character: the match
# ends at the last @ of the word, else at the next @ of the line.
_IN_URL = re.compile(
    r"""(://)(?:
      [^\s/?#@"'<>[:]{0,200}:(?!:|\d{1,5}(?:[/?#\s"'<>)\],;.]|:\s|\Z))(?:\S{0,2000}@|[^\n]{0,200}?@)
    | [^\s/?#@"'<>[:]{0,200}:\d{1,5}[/?#]\S{0,2000}@
    | [^\s/@"'<>]+@
    )""",
    re.VERBOSE,
)
_IN_QUERY = re.compile(
    r"([?&#][\w.%-]{0,40}(?:token|signature|sig|key|secret|password|credential)[\w.%-]{0,40}=)[^&\s\"'<>#]+",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b((?:bearer|basic)\s{1,8})[A-Za-z0-9._~+/=-]{12,}", re.IGNORECASE)
_PEM = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
# 40 hexadecimal digits are a key or a git commit. They are kept if the text before them, or their name, says commit.
_HEX40 = re.compile(r"(?<![0-9A-Za-z])[0-9a-fA-F]{40}(?![0-9A-Za-z])")
_COMMIT_BEFORE = re.compile(r"(?:revision|commit|sha\w*|digest|hash|snapshots/|@)\W{0,4}$", re.IGNORECASE)
_DIGEST_NAME = re.compile(r"revision|commit|sha|digest|hash|identity", re.IGNORECASE)
# Must not match `num_tokens`, `eos_token`, `tokenizer` and `key_value`.
_SECRET_NAME = re.compile(
    r"(?:^|[_.\-\s])(?:(?:hf|hub|auth|access|api|bearer|refresh|session|github|wandb|secret)[_-]?token|(?<![_-])token"
    r"|api[_-]?key|access[_-]?key(?:[_-]?id)?|private[_-]?key|wandb[_-]?key|secret(?:[_-]?key)?|client[_-]?secret"
    r"|password|passwd|pwd|passphrase|credentials?|authorization)$",
    re.IGNORECASE,
)
_SETTING = re.compile(r"(?:^|(?<=[{,\s]))[\"']?(?P<name>[\w.-]+)[\"']?[ \t]*[:=][ \t]*", re.MULTILINE)
_LINE_VALUE = re.compile(r".+?(?=[ \t]+#|[ \t]*$)", re.MULTILINE)
_INLINE_VALUE = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^,}\n]+")
_NOTHING = re.compile(r"(?:null|~|true|false|auto)?\s*(?:[,}#\n]|\Z)")
_URL = re.compile(r"[A-Za-z][\w+.-]{0,40}://[^\s'\"]*")
_SECRET_VARIABLE = re.compile(r"TOKEN|API_?KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|PRIVATE_KEY|ACCESS_KEY")


def secrets_of_environment(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Values of the variables with secret names, longest first. Skips values that are a word, a number or a path."""
    variables = os.environ if environment is None else environment
    values = (value.strip() for name, value in variables.items() if _SECRET_VARIABLE.search(name.upper()))
    kept = {v for v in values if len(v) >= SHORTEST and not v.isalpha() and not v.isdigit() and "/" not in v[:1]}
    return tuple(sorted(kept, key=len, reverse=True))


def without_secrets(url: str) -> str:
    """The URL without user, password, query and fragment. Of chained URLs (`zip://a::s3://b`) only the first is kept.
    A text that is not a URL is returned unchanged."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    return f"{scheme.rpartition(':')[2]}://{re.split('[?#]|::', _split_user(rest)[1])[0]}"


def secrets_of_url(url: str) -> tuple[str, ...]:
    """Every part of a URL that must not be shown, longest first."""
    user, rest = _split_user(url.partition("://")[2])
    query, fragment = rest.partition("?")[2], rest.partition("#")[2]
    values = [field.partition("=")[2] or field for field in query.split("&")]
    password = user.partition(":")[2] or user  # a user without a password may be a token
    # A library may parse the URL differently and show only part of the password. Parts of up to three characters are
    # ignored: they would match ordinary words.
    parts = [part for part in re.split(r"[^\w.~%+-]", password) if len(part) > 3]
    secrets = {password, *parts, query, *values, fragment}
    secrets |= {unquote(secret) for secret in secrets}
    return tuple(sorted(filter(None, secrets), key=len, reverse=True))


def _split_user(rest: str) -> tuple[str, str]:
    """Splits `user:password@host/path` into `user:password` and `host/path`. A password may contain any character,
    even those that end a host name."""
    host = re.split("[/?#]", rest)[0]
    user, at, after = rest.rpartition("@")
    return (user, after) if at and ("@" in host or ":" in host) else ("", rest)


def mask_urls(text: str, known: Iterable[str] = ()) -> str:
    """The text with the known secrets replaced, and with `without_secrets` applied to every URL in it."""
    return _URL.sub(lambda found: without_secrets(found[0]), _replace(text, known))


def mask_secrets(text: str, known: Iterable[str] = ()) -> str:
    """The text with the known secrets, and everything that looks like a key, replaced."""
    text = _replace(text, known)
    if len(text) < SHORTEST:
        return text
    text = _SHAPES.sub(MASK, text)
    text = _PEM.sub(rf"\1{MASK}\2", text)
    text = _IN_URL.sub(rf"\1{MASK}@", text)
    text = _IN_QUERY.sub(rf"\1{MASK}", text)
    text = _BEARER.sub(rf"\1{MASK}", text)
    return _HEX40.sub(_mask_unless_commit, text)


def mask_message(text: str, known: Iterable[str] = ()) -> str:
    """A message without secrets: keys by their shape, values by their name, passwords of URLs, and the secrets of the
    environment."""
    return mask_settings(text, (*known, *secrets_of_environment()))


def mask_settings(text: str, known: Iterable[str] = ()) -> str:
    """A settings file (YAML, JSON, NAME=value) without secrets, including values that only their name marks."""
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


def mask_values(value: object, known: Iterable[str] = (), name: str = "") -> Any:
    """JSON values without secrets; `name` is the key of the value."""
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


def _replace(text: str, secrets: Iterable[str]) -> str:
    """A short secret is replaced only as a whole word: the user "r" must not change the word "port"."""
    for secret in secrets:
        if len(secret) >= SHORTEST:
            text = text.replace(secret, MASK)
        else:
            text = re.sub(rf"(?<![^\W_]){re.escape(secret)}(?![^\W_])", MASK, text)
    return text


def _is_secret_name(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None


def _mask_unless_commit(found: re.Match[str]) -> str:
    before = found.string[max(found.start() - 16, 0) : found.start()]
    return found.group() if _COMMIT_BEFORE.search(before) else MASK
