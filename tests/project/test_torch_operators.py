"""torch and torchax have every operator that the supported models use; a missing one is named with its models."""

from __future__ import annotations

import pytest
from torch_operators import find_operator, missing_operators, operators_of, read_record

pytestmark = pytest.mark.core


def test_every_recorded_operator_exists() -> None:
    record = read_record()
    assert len(record) > 100 and len({name for names in record.values() for name in names}) > 130
    assert missing_operators(record) == []


def test_a_missing_operator_is_named_with_the_models_that_need_it() -> None:
    """One that torchax does not have, and one that torch does not have."""
    names = ["llama", "gemma2", "qwen3", "phi3", "olmo2", "mistral"]
    planted = {"torch.ops.aten.segment_reduce.default": names, "torch.ops.aten.no_such_operator.default": ["llama"]}
    assert find_operator("torch.ops.aten.segment_reduce.default") is not None
    assert missing_operators({**read_record(), **planted}) == [
        "torchax has no torch.ops.aten.segment_reduce.default, which is used by llama, gemma2, qwen3, phi3, olmo2 and "
        "1 more",
        "torch has no torch.ops.aten.no_such_operator.default, which is used by llama",
    ]


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_the_record_is_what_a_model_uses(name: str) -> None:
    found = operators_of(name)
    assert len(found) > 15
    assert found == {operator for operator, models in read_record().items() if name in models}
