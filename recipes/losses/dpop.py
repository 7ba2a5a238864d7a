"""DPO-Positive (Pal et al., 2024): DPO, but a chosen answer must not become less likely than the reference finds it."""

import jax


def loss(policy, reference, pairs, options):
    chosen, rejected = pairs.sums(policy - reference)
    penalty = 5 * jax.nn.relu(-chosen)
    return -jax.nn.log_sigmoid(options.beta * (chosen - rejected - penalty))
