"""Text and settings are masked if they look like secrets, and are unchanged otherwise. Guarantee S6."""

from __future__ import annotations

import pytest

from trillora.secrets import MASK, mask_secrets, mask_settings, mask_values, secrets_of_environment

CANARIES = {
    "hub": "hf_" + "CanaryHub" * 3,
    "hub in words": "use hf_" + "CanaryHub" * 3 + ", please",
    "model service": "sk-proj-" + "CanaryModel" * 3,
    "git": "ghp_" + "CanaryGit" * 4,
    "cloud": "AKIA" + "CANARYCANARYCANA",
    "browser": "AIza" + "CanaryBrowser" * 3,
    "web token": "eyJhbGciOiJI.eyJzdWIiOiIx.CanaryWebToken",
    "header": "Authorization: Bearer CanaryHeader123456",
    "old wandb": "ca0a12" * 6 + "ca0a",
    "new wandb": "wandb_v1_" + "CanaryBand" * 4,
    "address": "https://me:CanaryPass@example.org/rows.jsonl",
    "signed address": "https://example.org/rows.jsonl?a=1&X-Amz-Signature=CanarySigned&b=2",
    "private key": "-----BEGIN PRIVATE KEY-----\nCanaryKey\n-----END PRIVATE KEY-----",
}


@pytest.mark.parametrize("name", CANARIES)
def test_what_looks_like_a_secret_is_masked(name: str) -> None:
    masked = mask_secrets(f"before {CANARIES[name]} after")
    assert "canary" not in masked.lower() and "ca0a12" not in masked and MASK in masked
    assert masked.startswith("before ") and masked.endswith(" after")


@pytest.mark.parametrize(
    "text", ["?key", "eyJ-", "eyJ", "://a", "bearer ", "hf_", "a: ", "token: ", "-----BEGIN PRIVATE KEY-----"]
)
def test_long_hostile_texts_are_masked_in_linear_time(text: str) -> None:
    long = text * (100_000 // len(text))  # quadratic code would take minutes
    assert mask_settings(long) and mask_secrets(long)


@pytest.mark.parametrize(
    "text",
    [
        "revision: " + "ab" * 20,
        "org/model@" + "ab" * 20,
        "models--org--name/snapshots/" + "ab" * 20 + "/config.json",
        "sha256: " + "ab" * 32,
        "eos_token: <|im_end|>\nnum_tokens: 12345678\nmax_new_tokens: 10000000\ntokenizer: org/some-tokenizer",
        "mail someone@example.org, see https://example.org/a?b=c&page=3",
        "a task-force risk-assessment of half_precision hf_hub",
        "secret: null\npassword:\ntoken: ~",
        "The password policy is weak: secrets are not rotated.",
    ],
)
def test_text_without_secrets_is_unchanged(text: str) -> None:
    assert mask_settings(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "password: canary",
        "  api_key: 'canary, canary'   # mine",
        'tracking: {wandb_key: canary, hf_token: "canary }", rank: 8}',
        "HF_TOKEN=canary canary",
        '{"client_secret": "canary"}',
        "aws_secret_access_key: canary/canary+canary==",
        "token: canary",
    ],
)
def test_a_setting_named_like_a_secret_is_masked(text: str) -> None:
    masked = mask_settings(text)
    assert "canary" not in masked and MASK in masked
    assert ("rank: 8}" in masked) == ("rank: 8}" in text) and ("# mine" in masked) == ("# mine" in text)


def test_values_named_like_secrets_are_masked_at_any_depth() -> None:
    values = {"a": [{"password": "canary", "rank": 8}], "identity": {"model": "ab" * 20}, "pin": {"token": 1234}}
    masked = mask_values(values)
    assert masked == {"a": [{"password": MASK, "rank": 8}], "identity": {"model": "ab" * 20}, "pin": {"token": MASK}}


def test_secrets_of_the_environment_are_found_by_name() -> None:
    environment = {"HF_TOKEN": "canary-1", "MY_API_KEY": "canary-22", "PATH": "/usr/bin-1", "TOKEN_FILE": "/run/a-1"}
    assert secrets_of_environment({**environment, "USE_TOKEN": "yes", "KEY_SECRET": "12345678"}) == (
        "canary-22",
        "canary-1",
    )
