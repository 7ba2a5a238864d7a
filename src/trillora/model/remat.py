"""What a layer saves for the backward pass; everything else is recomputed there.

    remat      saved in each layer, in addition to its input                      values per token in Llama-3.1-8B
    none       everything
    linear     outputs of linear layers and of attention                          43,008
    wide       of those: attention, and layers wider than their input (up, gate)  32,768
    half       as linear in every second layer, nothing in the others             21,504
    gate       of those: attention, and the first layer wider than its input      18,432
    attention  outputs of attention, and the log-sum-exp of the TPU's kernel       4,096
    full       nothing                                                            0
    dots       outputs of all matmuls with a matrix, the adapter's too
    offload    as linear, but outputs of linear layers wait in the host's memory

The first matmul of experts counts as a layer wider than its input. A saved value that the backward pass does not need,
such as the output of the last linear layer, takes no memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal, ParamSpec, TypeVar

import jax

from trillora.engine.attention import SAVED_NAME as ATTENTION
from trillora.engine.mixture.experts import SAVED_NAME as SMALL
from trillora.model.trace import Trace

Given = ParamSpec("Given")
Result = TypeVar("Result")

Remat = Literal["none", "linear", "wide", "half", "gate", "attention", "full", "dots", "offload"]

# Names of values in policies: outputs of linear layers, by width. SMALL: values that take almost no memory.
LINEAR, FIRST_WIDE, WIDE = "linear", "first wide", "wide"

_policies = jax.checkpoint_policies
_LINEAR = _policies.save_only_these_names(LINEAR, FIRST_WIDE, WIDE, SMALL, ATTENTION)
POLICIES: dict[Remat, tuple[Callable[..., bool], ...]] = {  # of layers 0, 1, …, repeated
    "linear": (_LINEAR,),
    "wide": (_policies.save_only_these_names(FIRST_WIDE, WIDE, SMALL, ATTENTION),),
    "gate": (_policies.save_only_these_names(FIRST_WIDE, SMALL, ATTENTION),),
    "half": (_LINEAR, _policies.nothing_saveable),
    "attention": (_policies.save_only_these_names(SMALL, ATTENTION),),
    "full": (_policies.nothing_saveable,),
    "dots": (_policies.dots_with_no_batch_dims_saveable,),
    "offload": (
        _policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[SMALL, ATTENTION],
            names_which_can_be_offloaded=[LINEAR, FIRST_WIDE, WIDE],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    ),
}


def name_of_output(num_inputs: int, num_outputs: int, trace: Trace | None) -> str:
    """The name of a linear layer's output, by its width."""
    if num_outputs <= num_inputs:
        return LINEAR
    if trace is None:
        return WIDE
    trace.num_wide += 1
    return FIRST_WIDE if trace.num_wide == 1 else WIDE


def policy_number(remat: Remat, layer: int) -> int:
    """Layers with different numbers save different values."""
    return layer % len(POLICIES.get(remat, (None,)))


def recomputed_together(remat: Remat, layers: Sequence[int]) -> list[slice]:
    """Splits consecutive layers where they begin to save something else.

    >>> recomputed_together("half", [4, 5]), recomputed_together("linear", [4, 5])
    ([slice(0, 1, None), slice(1, 2, None)], [slice(0, 2, None)])
    """
    parts = [list(part) for _, part in itertools.groupby(range(len(layers)), lambda j: policy_number(remat, layers[j]))]
    return [slice(part[0], part[-1] + 1) for part in parts]


def checkpointed(body: Callable[Given, Result], remat: Remat, layer: int, *, looped: bool) -> Callable[Given, Result]:
    """Applies remat to a function that runs layers, beginning with `layer`. In a loop `prevent_cse` is not needed: XLA
    cannot merge the recomputation with the forward pass."""
    if remat == "none":
        return body
    policy = POLICIES[remat][policy_number(remat, layer)]
    return jax.checkpoint(body, policy=policy, prevent_cse=not looped)
