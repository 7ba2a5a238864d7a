"""Recomputation changes memory and time, not the gradients. test_estimate.py counts what each policy saves."""

from __future__ import annotations

import functools
import re

import jax
import numpy as np
import pytest
from architecture_checks import GRADIENTS, LOGITS, LORA, Subject, distance, gradient_distance, logits_and_gradients
from dose import slow_case

from trillora.model.layout import unstack
from trillora.model.remat import POLICIES, Remat, recomputed_together
from trillora.model.stack import RepeatedLayers
from trillora.recipe import schema

ROUNDING = 1e-5  # relative, float32


@functools.cache
def subject_of(name: str) -> Subject:
    return Subject(name)


def gradients_of(name: str, remat: Remat, *, scan: bool = True) -> dict[str, np.ndarray]:
    """Of the adapter. Checked against PyTorch's autograd."""
    subject = subject_of(name)
    ours = subject.ours(remat=remat, scan=scan)
    logits, gradients = logits_and_gradients(ours, *subject.weights(ours), subject.tokens)
    found = {key: np.asarray(gradient) for key, gradient in unstack(gradients, ours.adapter_layout).items()}
    assert distance(logits, subject.logits) <= LOGITS
    assert gradient_distance(found, subject.gradients) <= GRADIENTS
    return found


@functools.cache
def plain(name: str) -> dict[str, np.ndarray]:
    return gradients_of(name, "none")


@pytest.mark.parametrize(
    ("name", "remat", "scan"),
    [
        *(("llama", remat, True) for remat in ("wide", "half", "gate", "offload")),
        slow_case("llama", "attention", True),  # in the test of joined products below
        *(slow_case("llama", remat, False) for remat in ("wide", "half", "attention", "offload")),
        slow_case("exaone4", "half", True),  # layers with and without a window
        *(slow_case("gemma3_text", remat, True) for remat in ("wide", "half", "attention", "offload")),  # period of 3
        *(slow_case("deepseek_v3", remat, True) for remat in ("wide", "half", "attention", "offload")),  # dense first
        *(
            slow_case("gpt2", remat, True) for remat in ("wide", "half", "gate", "attention", "offload")
        ),  # transposed weights
        *(slow_case("zamba2", remat, True) for remat in ("wide", "half", "attention")),  # shared weights
    ],
)
def test_gradients_are_those_without_recomputation(name: str, remat: Remat, scan: bool) -> None:
    assert gradient_distance(gradients_of(name, remat, scan=scan), plain(name)) <= ROUNDING


def test_layers_that_save_different_values_have_bodies_of_their_own() -> None:
    ours = subject_of("llama").ours(remat="half")
    num_layers = len(ours.stack.layers)
    assert ours.stack.segments[0] == RepeatedLayers(0, 2, num_layers // 2)
    assert recomputed_together("half", [0, 1, 2]) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert recomputed_together("full", [0, 1, 2]) == [slice(0, 3)]


def test_recipes_have_the_same_names() -> None:
    assert set(schema.Remat.__args__) == {"none", *POLICIES} == set(Remat.__args__)  # type: ignore[attr-defined]


def test_products_joined_for_a_tpu_give_the_gradients_of_pytorch() -> None:
    """With the TPU's kernel, in its interpreter: layers that are called with the same input share one product."""
    subject = subject_of("llama")
    ours = subject.ours(remat="attention", attention="splash", interpret=True)
    logits, gradients = logits_and_gradients(ours, *subject.weights(ours), subject.tokens)
    found = {key: np.asarray(gradient) for key, gradient in unstack(gradients, ours.adapter_layout).items()}
    assert distance(logits, subject.logits) <= LOGITS
    assert gradient_distance(found, subject.gradients) <= GRADIENTS
    base, adapter = subject.weights(ours)
    program = str(
        jax.make_jaxpr(lambda adapter: ours.hidden(base, adapter, {"tokens": jax.numpy.asarray(subject.tokens)}))(
            adapter
        )
    )
    rank = LORA.rank
    sizes = [int(size) for size in re.findall(r"f32\[\d+,\d+,(\d+)\] = dot_general", program)]
    assert [sizes.count(num_layers * rank) for num_layers in (1, 2, 3)] == [2, 1, 1], "o, down; gate and up; q, k and v"
