"""How sure one can be of a share: Wilson's interval, and the unbiased pass@k. Pure functions."""

import math

Z_95 = 1.959964


def wilson(share: float, count: int) -> tuple[float, float]:
    """95 % interval of a share that was seen in `count` independent trials."""
    if count < 1:
        raise ValueError("an interval needs at least one trial")
    z2 = Z_95 * Z_95
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    spread = Z_95 * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count)) / (1 + z2 / count)
    return max(0.0, middle - spread), min(1.0, middle + spread)


def pass_at(k: int, *, samples: int, right: int) -> float:
    """Probability that k of the `samples` answers, drawn without putting back, hold a right one: no bias, unlike (1 - p)^k."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {samples}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)
