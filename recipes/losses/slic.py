"""SLiC (Zhao et al., 2023): a margin of 1 between both answers, and nothing beyond it."""

import jax


def loss(policy, reference, pairs, options):
    chosen, rejected = pairs.sums(policy - reference)
    return jax.nn.relu(1 - options.beta * (chosen - rejected))
