"""Measures how stale rollouts may be: the same run at several lags, with each kind of behaviour log-probs.

    python bench/staleness.py --lags 0 1 2 4 8 --seeds 3 --steps 60 [--variants worker recompute] [--plot FILE.png]

`tiny` learns to sort four digits, with 8 groups x 16 samples per step and the trainer's own step, in one process on one core.
Prints the held-out reward of the last version for every lag and seed, then the gain of overlapping generation and training,
computed from the measured seconds: a synchronous step takes g + t, an asynchronous one the larger of the two.

Variants: worker (the ratio is to the worker's log-probs), recompute (to the trainer's own at the start of the step),
truncate (recompute, with tokens weighted by min(trainer / worker, 2)).
"""

import argparse
import json
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

import torch
from one_loop import Curve, KeptRuns, OneLoop

from shoal.trainer.config import TrainerConfig

VARIANTS = {
    "worker": {},
    "recompute": {"behaviour": "recompute"},
    "truncate": {"behaviour": "recompute", "correction": "truncate"},
}


def run(options: argparse.Namespace, variant: str, lag: int, seed: int) -> Curve:
    config = TrainerConfig(
        learning_rate=options.rate,
        supervised_steps=20,
        row_tokens=64,
        rows_per_micro_batch=64,
        optimizer_steps=options.optimizer_steps,
        seed=seed,
        **VARIANTS[variant],  # type: ignore[arg-type]
    )
    return OneLoop(config, lag=lag, groups=options.groups, samples=options.samples).run(options.steps)


def line(name: str, lag: int, curves: list[Curve]) -> str:
    held_out = [curve.held_out for curve in curves]
    late = [fmean(curve.rewards[-10:]) for curve in curves]
    last = [figures for curve in curves for figures in curve.figures[-10:]]
    spread = stdev(held_out) if len(held_out) > 1 else 0.0
    return (
        f"{name:<10} {lag:>3}   {fmean(held_out):.3f} +- {spread:.3f}   "
        f"{'  '.join(f'{value:.3f}' for value in held_out)}   {fmean(late):.3f}   "
        f"{fmean(figures.logprob_gap for figures in last):.3f}   "
        f"{100 * fmean(figures.clip_fraction for figures in last):5.1f} %   "
        f"{max(figures.grad_norm for curve in curves for figures in curve.figures):6.2f}"
    )


def overlap(curves: list[Curve], steps: int) -> str:
    g = fmean(curve.generate_s for curve in curves) / steps
    t = fmean(curve.train_s for curve in curves) / steps
    return (
        f"generation {g:.3f} s, training {t:.3f} s per step (g:t = {g / t:.2f}); overlapped on two machines: "
        f"{(g + t) / max(g, t):.2f} times the synchronous speed (2 if both take equally long)"
    )


def plot(results: dict[tuple[str, int], list[Curve]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), dpi=120)
    for variant in dict.fromkeys(name for name, _ in results):
        lags = [lag for name, lag in results if name == variant]
        means = [fmean(curve.held_out for curve in results[variant, lag]) for lag in lags]
        (drawn,) = axes.plot(lags, means, "o-", label=variant)
        for lag in lags:
            ends = [curve.held_out for curve in results[variant, lag]]
            axes.plot([lag] * len(ends), ends, ".", color=drawn.get_color(), alpha=0.5)
    axes.set_xlabel("lag (versions)")
    axes.set_ylabel("held-out reward of the last version")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(title="behaviour log-probs")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--optimizer-steps", type=int, default=1)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=["worker", "recompute"])
    parser.add_argument("--plot", type=Path)
    KeptRuns.add_options(parser)
    parser.add_argument("--json", type=Path, help="write the reward of every step to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[tuple[str, int], list[Curve]] = {}
    kept = KeptRuns(options.results, options.seconds)
    settings = {
        name: getattr(options, name) for name in ("steps", "groups", "samples", "rate", "optimizer_steps")
    }
    print(
        "behaviour  lag   held-out (by seed)                    last 10   gap     clipped   largest gradient"
    )
    for variant in options.variants:
        for lag in options.lags:
            curves = [
                kept.get(
                    settings | {"variant": variant, "lag": lag, "seed": seed},
                    partial(run, options, variant, lag, seed),
                )
                for seed in range(options.seeds)
            ]
            if found := [curve for curve in curves if curve is not None]:
                results[variant, lag] = found
                print(line(variant, lag, found), flush=True)
    kept.say_what_is_missing()
    print(overlap([curve for curves in results.values() for curve in curves], options.steps))
    if options.plot:
        plot(results, options.plot)
    if options.json:
        records = [
            {
                "behaviour": variant,
                "lag": lag,
                "held_out": curve.held_out,
                "rewards": [round(reward, 4) for reward in curve.rewards],
            }
            for (variant, lag), curves in results.items()
            for curve in curves
        ]
        options.json.write_text(json.dumps(records) + "\n")


if __name__ == "__main__":
    main()
