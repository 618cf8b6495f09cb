"""What a proof costs: build and verify per proof, beside the raw top-k of the same states, in one run.

python bench/toploc.py --hidden 576 2048 5120 --tokens 1024 8192 32768

Processor time of one thread. The three take turns, and the best turn of each counts: what else the machine does only adds.
`raw top-k` is torch.topk of the absolute values in bfloat16, as the package has it.
"""

import argparse
import time
from collections.abc import Callable

import torch

from shoal import toploc

SEGMENT, TOPK = 32, 128


def microseconds(works: list[Callable[[], object]], num_proofs: int, repeats: int) -> list[float]:
    """Best time a proof of each."""
    best = [float("inf")] * len(works)
    for _ in range(repeats + 1):  # the first is a warm-up, and never the best
        for place, work in enumerate(works):
            started_s = time.thread_time()
            work()
            best[place] = min(best[place], time.thread_time() - started_s)
    return [seconds / num_proofs * 1e6 for seconds in best]


def measure(hidden: int, tokens: int, repeats: int) -> list[float]:
    states = [torch.randn(tokens, hidden).to(torch.bfloat16)]
    flat = states[0].view(tokens // SEGMENT, -1)
    proofs = toploc.build_proofs(states)
    return microseconds(
        [
            lambda: toploc.build_proofs(states),
            lambda: toploc.verify_proofs(proofs, states, control_seed=1),
            lambda: torch.topk(flat.abs(), TOPK, dim=1),
        ],
        len(flat),
        repeats,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, nargs="+", default=[576, 2048, 5120])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"one thread, proofs of {SEGMENT} states, topk {TOPK}; µs of processor time a proof, best of {options.repeats}"
    )
    print(f"{'hidden':>8} {'tokens':>8} {'build':>8} {'verify':>8} {'raw top-k':>10}")
    for hidden in options.hidden:
        for tokens in options.tokens:
            build, verify, raw = measure(hidden, tokens, options.repeats)
            print(f"{hidden:>8} {tokens:>8,} {build:>8.0f} {verify:>8.0f} {raw:>10.0f}", flush=True)


if __name__ == "__main__":
    main()
