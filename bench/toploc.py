"""Measures the cost of building and verifying a proof, compared with the raw top-k of the same states.

    python bench/toploc.py --hidden 576 2048 5120 --tokens 1024 8192 32768
    python bench/toploc.py --device cuda --hidden 576 2048 5120

Times are processor time of one thread. The three run in turns and the best of each counts, because other load only adds time.
`raw top-k` is torch.topk of the absolute values in bfloat16, as in the package.

With --device cuda: 64 rows of heavy-tailed lengths, as an engine proves them together. `host` is the processor time of the calling
thread, which delays a decoding thread while it holds the interpreter's lock; `wall` is the time until the bytes are on the host.
The polynomials are computed by the kernel, then by the host; both give the same bytes.
"""

import argparse
import time
from collections.abc import Callable
from unittest import mock

import numpy as np
import torch

from shoal import toploc
from shoal.toploc import build
from shoal.toploc.proof import num_segments

SEGMENT, TOPK = 32, 128
ROWS, CAP = 64, 512


def microseconds(works: list[Callable[[], object]], num_proofs: int, repeats: int) -> list[float]:
    """Returns the best time per proof of each function."""
    best = [float("inf")] * len(works)
    for _ in range(repeats + 1):  # the first turn is a warm-up and is never the best
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


def engine_rows(hidden: int, device: str) -> list[torch.Tensor]:
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(CAP / 6), 0.8, ROWS), 1, CAP).astype(int)
    return [torch.randn(length, hidden).to(torch.bfloat16).to(device) for length in lengths.tolist()]


def host_and_wall(rows: list[torch.Tensor], repeats: int) -> tuple[float, float, list[bytes]]:
    """Returns the best host and wall time in ms, and the proofs."""
    best_host = best_wall = float("inf")
    proofs: list[bytes] = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        wall_s, host_s = time.perf_counter(), time.thread_time()
        proofs = toploc.build_proofs(rows)
        best_host = min(best_host, time.thread_time() - host_s)
        best_wall = min(best_wall, time.perf_counter() - wall_s)
    return best_host * 1e3, best_wall * 1e3, proofs


def on_device(options: argparse.Namespace) -> None:
    print(
        f"{torch.cuda.get_device_name()}, {ROWS} rows of at most {CAP} tokens; ms per call, best of {options.repeats}"
    )
    print(f"{'hidden':>8} {'proofs':>8} {'host':>8} {'wall':>8}   by host: {'host':>8} {'wall':>8}")
    for hidden in options.hidden:
        rows = engine_rows(hidden, options.device)
        count = sum(num_segments(len(row), SEGMENT) for row in rows)
        host, wall, proofs = host_and_wall(rows, options.repeats)
        with mock.patch.object(build, "has_kernels", lambda _: False):
            old_host, old_wall, same = host_and_wall(rows, options.repeats)
        assert proofs == same
        print(
            f"{hidden:>8} {count:>8} {host:>8.2f} {wall:>8.2f} {old_host:>18.2f} {old_wall:>8.2f}", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, nargs="+", default=[576, 2048, 5120])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.device != "cpu":
        on_device(options)
        return
    print(
        f"one thread, proofs of {SEGMENT} states, topk {TOPK}; µs of processor time per proof, best of {options.repeats}"
    )
    print(f"{'hidden':>8} {'tokens':>8} {'build':>8} {'verify':>8} {'raw top-k':>10}")
    for hidden in options.hidden:
        for tokens in options.tokens:
            build, verify, raw = measure(hidden, tokens, options.repeats)
            print(f"{hidden:>8} {tokens:>8,} {build:>8.0f} {verify:>8.0f} {raw:>10.0f}", flush=True)


if __name__ == "__main__":
    main()
