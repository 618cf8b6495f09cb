"""Raises the learning rate until a run collapses, then tries what is said to delay it, and measures the early warnings.

    python bench/stability.py --seeds 2 --results FILE.jsonl --json bench/results/stability-tiny.json

`tiny` learns to sort four digits with a lag of 2, in one process on one core. A run has collapsed when the mean reward of ten
steps is under half of the best ten before it; in long runs that happens by chance, so use `--steps 1200 --window 40`. Prints for
every variant and seed: the best ten steps, the deepest fall from the best ten until then, the last ten, the step of the collapse, and
how many steps before it each early warning came; then the false warnings of the runs that did not collapse.
The plain recipe runs at every rate of `--rates`, the variants at `--variants-at`. `second` is the plain run again, on the last
version of a run of as many steps at `--first-rate`.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from one_loop import Curve, KeptRuns, OneLoop

from shoal.trainer.config import TrainerConfig

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one-sided": {"delta": 1e9},
    "clip-0.1": {"clip_norm": 0.1},
    "clip-0.05": {"clip_norm": 0.05},
    "kl-0.001": {"kl": 1e-3},
    "kl-0.01": {"kl": 1e-2},
    "updates-4": {"optimizer_steps": 4},
    "updates-4-one-sided": {"optimizer_steps": 4, "delta": 1e9},
    "updates-4-clip-0.1": {"optimizer_steps": 4, "clip_norm": 0.1},
    "second": {},
}


def run(options: argparse.Namespace, variant: str, rate: float, seed: int) -> Curve:
    config = TrainerConfig(
        learning_rate=rate,
        supervised_steps=20,
        row_tokens=64,
        rows_per_micro_batch=64,
        seed=seed,
        **VARIANTS[variant],
    )
    loop = OneLoop(config, lag=options.lag, groups=options.groups, samples=options.samples)
    if variant == "second":
        loop.start(config.model_copy(update={"learning_rate": options.first_rate}))
        loop.run(options.steps)
        loop.start(config)
    return loop.run(options.steps)


def means(values: list[float], window: int) -> list[float]:
    """Returns the mean of the last `window` values, at every step from that one on."""
    return [fmean(values[end - window : end]) for end in range(window, len(values) + 1)]


def shares_of_best(rewards: list[float], window: int) -> list[float]:
    """Returns the mean of the last `window` rewards, at every step from that one on, as a share of the best mean until then."""
    recent = means(rewards, window)
    return [mean / best if best else 1.0 for mean, best in zip(recent, accumulate(recent, max), strict=True)]


def collapse_step(rewards: list[float], window: int) -> int | None:
    """Returns the step after which `window` steps had less than half the reward of the best ones before; None if none had."""
    fallen = (place for place, share in enumerate(shares_of_best(rewards, window)) if share < 0.5)
    place = next(fallen, None)
    return None if place is None else place + window


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is kept of a run for tables and pictures."""

    variant: str
    rate: float
    seed: int
    rewards: list[float]
    grad_norm: list[float]
    clip_fraction: list[float]
    entropy: list[float]
    collapsed: int | None
    warnings: list[tuple[int, str]]
    held_out: float


def outcome(variant: str, rate: float, seed: int, curve: Curve, window: int) -> Outcome:
    def column(name: str) -> list[float]:
        return [round(getattr(figures, name), 4) for figures in curve.figures]

    return Outcome(
        variant=variant,
        rate=rate,
        seed=seed,
        rewards=[round(reward, 4) for reward in curve.rewards],
        grad_norm=column("grad_norm"),
        clip_fraction=column("clip_fraction"),
        entropy=column("entropy"),
        collapsed=collapse_step(curve.rewards, window),
        warnings=[(step, kind) for step, kind in curve.warnings],
        held_out=curve.held_out,
    )


def line(one: Outcome, window: int) -> str:
    firsts = {kind: step for step, kind in reversed(one.warnings)}
    if one.collapsed is None:
        words = ", ".join(f"{kind} at {step}" for kind, step in firsts.items())
        end = f"no collapse   warned: {words or '-'}"
    else:
        leads = ", ".join(f"{kind} {one.collapsed - step:+}" for kind, step in firsts.items())
        end = f"collapse {one.collapsed:>4}   lead: {leads or 'no warning'}"
    rewards = means(one.rewards, window)
    fall = min(shares_of_best(one.rewards, window))
    return (
        f"{one.variant:<20} {one.rate:<7g} {one.seed}   best {max(rewards):.3f}   falls to {fall:.0%}   last {rewards[-1]:.3f}   held out "
        f"{one.held_out:.3f}   gradient {median(one.grad_norm):.2f} to {max(one.grad_norm):.2f}   {end}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 7e-4, 1e-3, 2e-3])
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--variants-at", type=float, default=1e-3)
    parser.add_argument("--first-rate", type=float, default=3e-4)
    parser.add_argument("--lag", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--window", type=int, default=10, help="steps whose mean reward tells a collapse")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--samples", type=int, default=16)
    KeptRuns.add_options(parser)
    parser.add_argument("--json", type=Path, help="write what is drawn to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = KeptRuns(options.results, options.seconds)
    settings = {name: getattr(options, name) for name in ("lag", "steps", "groups", "samples")}
    found: list[Outcome] = []
    cells = [("plain", rate) for rate in options.rates]
    cells += [(variant, options.variants_at) for variant in options.variants]
    for seed in range(options.seeds):
        for variant, rate in dict.fromkeys(cells):
            cell = {"variant": variant, "rate": rate, "seed": seed}
            curve = kept.get(settings | cell, partial(run, options, variant, rate, seed))
            if curve is not None:
                found.append(outcome(variant, rate, seed, curve, options.window))
                print(line(found[-1], options.window), flush=True)
    kept.say_what_is_missing()
    stable = [one for one in found if one.collapsed is None]
    print(
        f"{len(found) - len(stable)} of {len(found)} runs collapsed; {sum(len(one.warnings) for one in stable)} warnings in "
        f"{sum(len(one.rewards) for one in stable):,} steps of the runs that did not"
    )
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found]) + "\n")


if __name__ == "__main__":
    main()
