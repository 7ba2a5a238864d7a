"""The engine equals plain PyTorch for 23 architectures, which cover every mechanism; `make test` runs 20 of them."""

from __future__ import annotations

import pytest
import tiny_models
from architecture_checks import CHECKS, Subject
from dose import FULL, slow_case

from trillora.errors import TrilloraError
from trillora.model import bridge

SUITE = tiny_models.buildable(tiny_models.SUITE)
# The part of the suite that also runs with the oldest supported libraries.
CORE = ("qwen3", "gemma2", "mixtral", "gpt2", "falcon_h1")
# `make test` leaves these out: others there have the same parts, and window keys have a test in test_overrides.py.
SLOW = ("granitemoehybrid", "inkling_text", "deepseek_v4")


# `make test` asks this one every question.
ASKED_EVERYTHING = ("qwen3",)
PACKED = ("falcon_h1", "qwen3_next", "gemma2")
# `make test` asks these only about packing, which compares logits of scanned layers too. The others are asked about
# gradients, as are experts in test_experts.py.
ONLY_PACKED = (
    *("gemma4_text_shared_kv", "diffllama", "cohere2", "bloom", "gpt_oss", "llama4_text", "deepseek_v3"),
    *("jamba", "zamba2", "lfm2", "hy_v4", "minimax_m3_vl_text", "minimax", "recurrent_gemma"),
)
# All layers of these are of one kind, so `make test` builds two.
TWO_LAYERS = ("qwen3", "falcon_h1")


def questions_of(name: str) -> tuple[str, ...]:
    """Packing is asked of all models that keep a state along the sequence, which packing has to reset, and of those
    that choose keys. Attention has one mask for all models."""
    if FULL or name in ASKED_EVERYTHING:
        return tuple(CHECKS)
    if name in ONLY_PACKED:
        return ("packed",)
    return ("scanned", "packed") if name in PACKED else ("scanned",)


def test_suite_is_large_enough() -> None:
    assert len(SUITE) >= 20 and set(SLOW) < set(SUITE)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.core) if name in CORE else slow_case(name) if name in SLOW else name
        for name in SUITE
    ],
)
def test_engine_equals_pytorch(name: str) -> None:
    # PyTorch is slow in bfloat16. The model that is asked about it here has no experts, so few sequences are enough.
    subject = Subject(name) if FULL else Subject(name, 2 if name in TWO_LAYERS else None, bfloat16_rows=24)
    questions = questions_of(name)
    answers = {question: CHECKS[question](subject) for question in questions}
    assert len(CHECKS) == 7 and len(answers) in (1, 2, 7)
    assert all(answer.passed for answer in answers.values()), answers


def test_a_model_that_cannot_be_traced_names_operation_and_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "static_loops", lambda model: [])
    with pytest.raises(TrilloraError, match="cannot be traced: Concretization") as caught:
        CHECKS["unrolled"](Subject("dbrx"))
    assert "modeling_dbrx.py" in str(caught.value.where) and "docs/models.md" in caught.value.do
