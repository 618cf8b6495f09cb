"""Derives all randomness of a lease from its seed, so that a validator can repeat every draw. docs/wire/draw.md is the standard.

    task               = the first whose cumulative weight exceeds HMAC-SHA256(lease seed, "task") / 2^64 of all weights
    prompt seed i      = HMAC-SHA256(lease seed, "prompt/" i), first 8 bytes, big-endian; of attempt a > 0, "prompt/" i "/" a
    sample seed (i, j) = HMAC-SHA256(lease seed, "sample/" i "/" j), first 8 bytes, big-endian
    uniform t          = (splitmix64 output t of the sample seed) >> 11, times 2^-53   (t = 0: the first new token)
    token t            = the first id whose cumulative probability exceeds uniform t

The cumulative distribution is that of softmax(logits / temperature), over token ids in ascending order.
"""

import bisect
import hashlib
import hmac
import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GOLDEN = 0x9E3779B97F4A7C15


def lease_seed(epoch_secret: bytes, lease_id: str, node: str) -> str:
    return hmac.new(epoch_secret, f"lease/{lease_id}/{node}".encode(), hashlib.sha256).hexdigest()


def choose_task(seed: str, weights: Sequence[float]) -> int:
    """Returns the index of the task of a train lease, drawn by weight."""
    if len(weights) == 1:
        return 0
    point = _fraction(seed, "task") * math.fsum(weights)
    return min(bisect.bisect_right(list(itertools.accumulate(weights)), point), len(weights) - 1)


def prompt_seed(seed: str, prompt_index: int, attempt: int = 0) -> int:
    return _derive(seed, f"prompt/{prompt_index}/{attempt}" if attempt else f"prompt/{prompt_index}")


def acceptance_draw(seed: str, prompt_index: int, attempt: int) -> float:
    """Returns a number in [0, 1): difficulty sampling accepts the attempt if it is below the problem's weight."""
    return _fraction(seed, f"accept/{prompt_index}/{attempt}")


def problem_seeds(
    seed: str, *, run: str, purpose: str, chunk: int, num_prompts: int, attempts: Sequence[int] = ()
) -> list[int]:
    """Returns the seeds of a lease's problems. Held-out problems are the same for every policy version and every node."""
    source = seed if purpose == "train" else hashlib.sha256(f"eval/{run}/{chunk}".encode()).hexdigest()
    return [
        prompt_seed(source, index, attempts[index] if index < len(attempts) else 0)
        for index in range(num_prompts)
    ]


def sample_seed(seed: str, prompt_index: int, sample_index: int) -> int:
    return _derive(seed, f"sample/{prompt_index}/{sample_index}")


def uniforms(
    sample_seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Returns uniforms in [0, 1) for each (sample seed, position) pair; the two arrays broadcast."""
    with np.errstate(over="ignore"):
        z = sample_seeds + (positions + np.uint64(1)) * np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    result: npt.NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


def _fraction(seed: str, purpose: str) -> float:
    """Returns a number in [0, 1) with 53 bits, so that no rounding makes it 1."""
    return (_derive(seed, purpose) >> 11) * 2.0**-53


def _derive(seed: str, purpose: str) -> int:
    return int.from_bytes(hmac.new(bytes.fromhex(seed), purpose.encode(), hashlib.sha256).digest()[:8], "big")
