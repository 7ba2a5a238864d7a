"""The table of tiny models is complete, and every model in it is a causal language model that PyTorch can run."""

from __future__ import annotations

import pytest
import tiny_models
import torch
import transformers
from dose import slow_case
from transformers import PreTrainedModel

ROWS, TOKENS = 2, 24
# The version of transformers that the table was made for. Other versions may have model types without an entry.
TABLE_VERSION = "5.22"


def _tokens() -> torch.Tensor:
    # 0, 1 and 2 are the padding, start and end tokens in every case.
    return torch.randint(3, tiny_models.VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))


def _with_another_token(ids: torch.Tensor, position: int) -> torch.Tensor:
    changed = ids.clone()
    changed[:, position] = torch.where(ids[:, position] == 3, 4, 3)
    return changed


def _logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def test_every_causal_model_type_has_a_case_or_a_reason() -> None:
    without_reason = sorted(model_type for model_type, reason in tiny_models.uncovered().items() if reason is None)
    if transformers.__version__.startswith(TABLE_VERSION):
        assert without_reason == []
    elif without_reason:
        pytest.skip(f"transformers {transformers.__version__} has model types without an entry: {without_reason}")


def test_no_model_type_has_both_a_case_and_a_reason() -> None:
    assert {case.model_type for case in tiny_models.CASES.values()}.isdisjoint(tiny_models.NOT_COVERED)


def test_every_mechanism_is_explained_and_covered_by_the_suite() -> None:
    named = {mechanism for case in tiny_models.CASES.values() for mechanism in case.mechanisms}
    in_suite = {mechanism for name in tiny_models.SUITE for mechanism in tiny_models.CASES[name].mechanisms}
    assert named == set(tiny_models.MECHANISMS) == in_suite
    assert len(set(tiny_models.SUITE)) == 23


# transformers' gpt_bigcode uses torch.jit.script at import.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "name", [name if name in tiny_models.SUITE else slow_case(name) for name in tiny_models.buildable()]
)
def test_model_is_a_causal_language_model(name: str) -> None:
    model, ids = tiny_models.build(name), _tokens()
    logits = _logits(model, ids)
    assert logits.shape == (ROWS, TOKENS, tiny_models.VOCABULARY)
    assert logits.isfinite().all()
    assert logits.std() > 0.01, "logits are too flat for a meaningful comparison"
    # Same shapes, same kernels: only the order of sums over experts may change the last bit.
    after_last = _logits(model, _with_another_token(ids, TOKENS - 1))
    torch.testing.assert_close(after_last[:, :-1], logits[:, :-1], rtol=0, atol=1e-5 * logits.abs().max().item())
    after_first = _logits(model, _with_another_token(ids, 0))
    assert (after_first[:, 1:] - logits[:, 1:]).abs().max() > 0.01 * logits.abs().max(), (
        "later tokens do not depend on earlier ones"
    )


def test_half_precision_model_has_the_rounded_weights() -> None:
    exact = tiny_models.build("deepseek_v3").state_dict()
    rounded = tiny_models.build("deepseek_v3", dtype=torch.bfloat16).state_dict()
    assert rounded.keys() == exact.keys()
    for name, tensor in rounded.items():
        torch.testing.assert_close(tensor, exact[name].to(tensor.dtype), rtol=0, atol=0)
    assert rounded["lm_head.weight"].dtype == torch.bfloat16
