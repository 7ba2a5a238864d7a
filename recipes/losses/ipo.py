"""IPO (Azar et al., 2023): the mean log-ratios of both answers should differ by 1 / (2 beta)."""


def loss(policy, reference, pairs, options):
    chosen, rejected = pairs.means(policy - reference)
    return (chosen - rejected - 1 / (2 * options.beta)) ** 2
