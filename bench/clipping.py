"""Compares two-sided with one-sided clipping on a run with a large lag and a high learning rate.

    python bench/clipping.py --lag 8 --rate 1e-3 --seeds 3 --steps 60 [--plot docs/img/clipping.png]

`tiny` learns to sort four digits, with 8 groups x 16 samples per step and the trainer's own step, in one process on one core.
One-sided is the same run with a delta so large that it never clips. Prints for each the gradient's norm before clipping (median,
99th percentile, largest), the number of spikes (steps over ten times the median), and the held-out reward at the end.
"""

import argparse
from functools import partial
from pathlib import Path
from statistics import fmean, median

import torch
from one_loop import Curve, KeptRuns, OneLoop

from shoal.trainer.config import TrainerConfig

DELTAS = {"two-sided (delta 4)": 4.0, "one-sided": 1e9}


def run(options: argparse.Namespace, delta: float, seed: int) -> Curve:
    config = TrainerConfig(
        learning_rate=options.rate,
        delta=delta,
        clip_norm=options.clip_norm,
        supervised_steps=20,
        row_tokens=64,
        rows_per_micro_batch=64,
        seed=seed,
    )
    return OneLoop(config, lag=options.lag, groups=options.groups, samples=options.samples).run(options.steps)


def line(name: str, curves: list[Curve]) -> str:
    norms = sorted(figures.grad_norm for curve in curves for figures in curve.figures)
    middle = median(norms)
    return (
        f"{name:<20} {middle:7.2f}  {norms[int(0.99 * (len(norms) - 1))]:10.2f}  {norms[-1]:10.2f}  "
        f"{sum(norm > 10 * middle for norm in norms):>4} of {len(norms)}   "
        f"{fmean(curve.held_out for curve in curves):.3f} "
        f"({', '.join(f'{curve.held_out:.3f}' for curve in curves)})"
    )


def plot(results: dict[str, list[Curve]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (norms, rewards) = pyplot.subplots(1, 2, figsize=(10, 4), dpi=120)
    for name, color in zip(results, ("#1f4e79", "#c0504d"), strict=True):
        for index, curve in enumerate(results[name]):
            label = name if index == 0 else None
            norms.plot([figures.grad_norm for figures in curve.figures], color=color, alpha=0.7, label=label)
            rewards.plot(curve.rewards, color=color, alpha=0.7, label=label)
    norms.set_yscale("log")
    norms.set_ylabel("gradient norm before clipping")
    rewards.set_ylabel("mean reward of the batch")
    rewards.set_ylim(0, 1.02)
    for axes in (norms, rewards):
        axes.set_xlabel("policy version")
        axes.grid(alpha=0.3)
    norms.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lag", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--clip-norm", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--plot", type=Path)
    KeptRuns.add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, list[Curve]] = {}
    kept = KeptRuns(options.results, options.seconds)
    settings = {
        name: getattr(options, name) for name in ("lag", "rate", "clip_norm", "steps", "groups", "samples")
    }
    print("clip                  median         99 %     largest  spikes        held-out (by seed)")
    for name, delta in DELTAS.items():
        curves = [
            kept.get(settings | {"clip": name, "seed": seed}, partial(run, options, delta, seed))
            for seed in range(options.seeds)
        ]
        if found := [curve for curve in curves if curve is not None]:
            results[name] = found
            print(line(name, found), flush=True)
    kept.say_what_is_missing()
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
