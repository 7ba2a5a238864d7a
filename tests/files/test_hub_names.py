"""Names on the Hugging Face hub: the rule is the hub's own."""

from __future__ import annotations

import itertools

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from trillora.files.hub import HUB_ID, HUB_ID_AT


def is_valid(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name  # without an owner it is a local name here


def test_a_name_is_accepted_exactly_if_the_hub_accepts_it() -> None:
    """All owners and names of up to three characters out of six kinds. The hub also refuses -- and .. inside, and .git
    at the end: what contains one of them is shown as not found on the hub."""
    words = ["".join(letters) for size in (1, 2, 3) for letters in itertools.product("a7_-.é", repeat=size)]
    names = [f"{owner}/{name}" for owner in words for name in ("a", "Q-3.x")] + [f"a/{name}" for name in words]
    names = [name for name in names if "--" not in name and ".." not in name]
    accepted = [name for name in names if is_valid(name)]
    assert [name for name in names if HUB_ID.fullmatch(name)] == accepted
    assert len(names) > 400 and 100 < len(accepted) < len(names) - 100
    assert all(not HUB_ID.fullmatch(name) for name in ("a", "a/", "/a", "a/b/c", "./a", "~/a", "a/b@main", ""))


def test_a_revision_may_follow_a_name() -> None:
    found = HUB_ID_AT.fullmatch("org/a-b.c@refs/pr/1")
    assert found is not None and found.groupdict() == {"id": "org/a-b.c", "revision": "refs/pr/1"}
    plain = HUB_ID_AT.fullmatch("org/a")
    assert plain is not None and plain["revision"] is None
    assert [name for name in ("org/a@", "org/a@/x", "org/-a@main") if HUB_ID_AT.fullmatch(name)] == []
