"""Advantages: how much better an answer was than its group."""

import math
from collections.abc import Sequence

from shoal.trainer.config import AdvantageKind

STD_FLOOR = 1e-6
"""Added to the standard deviation, as in the released code; it matters only for rewards that hardly differ."""


def group_advantages(rewards_G: Sequence[float], kind: AdvantageKind) -> list[float]:
    """Advantages of the samples of one prompt.

        mean:  A_i = r_i - mean(r)
        std:   A_i = (r_i - mean(r)) / (std(r) + 1e-6), std with G - 1 below the line

    >>> group_advantages([0.0, 1.0], "mean")
    [-0.5, 0.5]
    """
    num_samples = len(rewards_G)
    if num_samples < 2:
        raise ValueError(
            f"a group of {num_samples} has nothing to compare with; set samples_per_prompt to 2 or more"
        )
    mean = math.fsum(rewards_G) / num_samples
    centred_G = [reward - mean for reward in rewards_G]
    if kind == "mean":
        return centred_G
    std = math.sqrt(math.fsum(value * value for value in centred_G) / (num_samples - 1))
    return [value / (std + STD_FLOOR) for value in centred_G]
