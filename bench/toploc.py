"""What a proof costs: build and verify per proof, beside the raw top-k of the same states, in one run.

python bench/toploc.py --hidden 576 2048 5120 --tokens 8192
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from shoal import toploc

SEGMENT, TOPK = 32, 128


def microseconds(work: Callable[[], object], num_proofs: int, repeats: int) -> float:
    """Median time a proof."""
    work()
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times) / num_proofs * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 576, 2048, 5120])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    num_proofs = options.tokens // SEGMENT
    print(
        f"one thread, {num_proofs} proofs of {SEGMENT} states, topk {TOPK}; µs a proof, median of {options.repeats}"
    )
    print(f"{'hidden':>8} {'build':>8} {'verify':>8} {'raw top-k':>10}")
    for hidden in options.hidden:
        states = [torch.randn(options.tokens, hidden).to(torch.bfloat16)]
        flat = states[0].view(num_proofs, -1).abs()
        proofs = toploc.build_proofs(states)
        build = microseconds(lambda states=states: toploc.build_proofs(states), num_proofs, options.repeats)
        verify = microseconds(
            lambda states=states, proofs=proofs: toploc.verify_proofs(proofs, states, control_seed=1),
            num_proofs,
            options.repeats,
        )
        topk = microseconds(lambda flat=flat: torch.topk(flat, TOPK, dim=1), num_proofs, options.repeats)
        print(f"{hidden:>8} {build:>8.0f} {verify:>8.0f} {topk:>10.0f}")


if __name__ == "__main__":
    main()
