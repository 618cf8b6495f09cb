"""Measures how often honest work is refused or void, by the pair of paths that made and checked it, and by the terms of a run.

    python bench/false_alarms.py
    python bench/false_alarms.py --makers torch --dtype float32 --conditions "24 tokens" "task add"
    python bench/false_alarms.py --model smollm2-135m --device cuda --submissions 400 --out alarms.json

Each condition is a run of its own: answers of up to 1 to 2,000 tokens, temperatures 0.6 to 1.2, other tasks, long prompts. It is
calibrated with 512 rows of each engine (torch, transformers) that are checked by each path of a validator: packed prefill, the same
by plain products, transformers. Then fresh honest submissions of 16 rows are judged: those of the measured pairs by the noise of
their pair, and those of a class that the calibration does not have (the plain decoder) by the widest noise, with a second path
before a refusal.

The extrapolated rate is no count: the largest score of each submission, relative to its bound for a refusal, is taken to have an
exponential tail above its 90th percentile.
"""

import argparse
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal import toploc
from shoal.cli.arena.contest import PROMPTS, SAMPLES, Arena, ArenaSettings, sent_states
from shoal.cli.arena.own_decision import row_facts
from shoal.cli.arena.schemes import CheckedRow, PublishedToploc, verify
from shoal.cli.commands.sample_answers import model_folder
from shoal.cli.ui.values import wilson
from shoal.model.load_model import DTYPES, load_transformers_model
from shoal.rollout.adversary.adaptive import Adapted, PlainEngine
from shoal.rollout.engine.api import Behaviour
from shoal.rollout.engine.transformers_engine import TransformersEngine
from shoal.swarm.validator import fact_checks
from shoal.swarm.validator.fact_checks import RowFacts
from shoal.swarm.validator.prefill import LoadedPolicy
from shoal.swarm.validator.recompute import RowsToCheck
from shoal.wire.codes import ACCEPTED, Rejected
from shoal.wire.lease import Lease
from shoal.wire.proof_noise import Noise
from shoal.wire.rollouts import RolloutTable

ROWS = 512
PER_SUBMISSION = PROMPTS * SAMPLES


@dataclass(frozen=True)
class Condition:
    name: str
    new_tokens: int = 24
    temperature: float = 1.0
    task: str = "sort"
    options: dict[str, bool | int | float | str] = field(default_factory=dict)


CONDITIONS = (
    Condition("24 tokens"),
    Condition("1 token", new_tokens=1),
    Condition("2 tokens", new_tokens=2),
    Condition("8 tokens", new_tokens=8),
    Condition("128 tokens", new_tokens=128),
    Condition("512 tokens", new_tokens=512),
    Condition("2,000 tokens", new_tokens=2000),
    Condition("temperature 0.6", temperature=0.6),
    Condition("temperature 1.2", temperature=1.2),
    Condition("task add", task="add"),
    Condition("task count", task="count"),
    Condition("long prompts", options={"length": 12, "style": "chat"}),
)
Paths = dict[str, LoadedPolicy]
MAKERS = ("torch", "transformers")
UNKNOWN = "unknown"
TAIL = 0.9
"""Quantile of the largest scores above which their tail is taken to be exponential."""


@dataclass
class Judged:
    """The verdicts on the submissions of one pair, and the largest score of each, relative to its bound for a refusal."""

    codes: Counter[str] = field(default_factory=Counter)
    scores: list[float] = field(default_factory=list)

    def add(self, other: "Judged") -> None:
        self.codes.update(other.codes)
        self.scores += other.scores

    @property
    def refused(self) -> int:
        return sum(number for code, number in self.codes.items() if code.startswith("reject."))

    @property
    def void(self) -> int:
        return sum(number for code, number in self.codes.items() if code.startswith("void."))

    def extrapolated(self) -> float:
        """Returns the share of submissions with a score above 1, by an exponential tail above the quantile TAIL."""
        edge = float(np.quantile(self.scores, TAIL))
        excess = [score - edge for score in self.scores if score > edge]
        return (
            (1 - TAIL) * math.exp(-(1 - edge) / float(np.mean(excess))) if excess and edge < 1 else math.nan
        )


class Bench:
    def __init__(self, arena: Arena, makers: Sequence[str]) -> None:
        self.arena, self.makers = arena, makers
        settings = arena.settings
        model = load_transformers_model(arena.folder, DTYPES[settings.dtype], settings.device)
        self.paths: Paths = {
            "prefill": arena.policy,
            "plain": replace(arena.policy, plain=True),
            "transformers": replace(arena.policy, decoder=model),
        }
        self.noise: dict[tuple[str, str], Noise] = {}
        self.widest = self.calibrate()

    def behaviour(self, maker: str) -> Behaviour:
        device = self.arena.settings.device
        if maker == "torch":
            return Behaviour()
        return Adapted(TransformersEngine if maker == "transformers" else PlainEngine, device=device)  # type: ignore[arg-type]

    def generate(self, maker: str, leases: list[Lease]) -> list[RolloutTable]:
        behaviour = self.behaviour(maker)
        return self.arena.work(behaviour, self.arena.engine(behaviour), leases)

    def facts(
        self, path: str, tables: list[RolloutTable], leases: list[Lease]
    ) -> tuple[list[CheckedRow], list[RowFacts]]:
        self.arena.policy = self.paths[path]
        rows = self.arena.check(
            [RowsToCheck(table.rows, lease) for table, lease in zip(tables, leases, strict=True)]
        )
        width = rows[0].states_TH.shape[1]
        proofs = PublishedToploc().commit([sent_states(row, width) for row in rows])
        checks = verify(rows, proofs, PublishedToploc.proof)
        return rows, [row_facts(row, segments) for row, segments in zip(rows, checks, strict=True)]

    def calibrate(self) -> Noise:
        """Measures the noise of every pair; returns that of all together."""
        units, prompts = {}, {}
        leases = self.arena.leases(ROWS // PER_SUBMISSION)
        for maker in self.makers:
            tables = self.generate(maker, leases)
            for path in self.paths:
                rows, facts = self.facts(path, tables, leases)
                name = f"{maker} to {path}"
                units[name] = [
                    fact_checks.units_of(row.rollout, fact) for row, fact in zip(rows, facts, strict=True)
                ]
                prompts[name] = [
                    PROMPTS * (place // PER_SUBMISSION) + row.rollout.prompt_index
                    for place, row in enumerate(rows)
                ]
                self.noise[maker, path] = self.measure({name: units[name]}, {name: prompts[name]})
        return self.measure(units, prompts)

    def measure(self, units: dict[str, Any], prompts: dict[str, list[int]]) -> Noise:
        settings = self.arena.settings
        return toploc.measure_noise(
            units, model=settings.model, compute_dtype=settings.dtype, prompts=prompts
        )

    def judge(self, maker: str, count: int) -> dict[str, Judged]:
        """Returns the verdicts on fresh submissions, by path."""
        leases = self.arena.leases(count)
        tables = self.generate(maker, leases)
        found = {path: self.facts(path, tables, leases) for path in self.paths}
        judged = {path: Judged() for path in self.paths}
        for place in range(count):
            part = slice(place * PER_SUBMISSION, (place + 1) * PER_SUBMISSION)
            of_path = {
                path: self.verdict(rows[part], facts[part], self.noise.get((maker, path), self.widest))
                for path, (rows, facts) in found.items()
            }
            for path, (code, score) in of_path.items():
                # A validator that meets an unknown class asks its second path before it refuses.
                second = of_path["prefill" if path == "plain" else "plain"][0]
                judged[path].codes[ACCEPTED if maker == UNKNOWN and second == ACCEPTED else code] += 1
                judged[path].scores.append(score)
        return judged

    def verdict(self, rows: list[CheckedRow], facts: list[RowFacts], noise: Noise) -> tuple[str, float]:
        rollouts = [row.rollout for row in rows]
        scores = fact_checks.score_facts(rollouts, facts, noise)
        largest = max((score.z / score.certain for score in scores if score.certain > 0), default=0.0)
        try:
            fact_checks.check_facts(rollouts, facts, self.arena.tolerances, noise, scores)
        except Rejected as rejected:
            return rejected.code, largest
        return ACCEPTED, largest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--submissions", type=int, default=64, help="of each pair and condition")
    parser.add_argument("--makers", choices=MAKERS, nargs="+", default=MAKERS)
    parser.add_argument("--max-rows", type=int, default=64)
    parser.add_argument("--conditions", nargs="+", help="only these")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began_s, results, totals = time.monotonic(), {}, dict[str, Judged]()
    print(
        f"{'condition':<18} {'tokens':>9}   refused, void of {options.submissions}, by pair (made by to checked by)"
    )
    with model_folder(options.model) as folder, torch.inference_mode():
        for condition in CONDITIONS:
            if options.conditions and condition.name not in options.conditions:
                continue
            settings = ArenaSettings(
                model=options.model,
                task=condition.task,
                task_options=condition.options,
                dtype=options.dtype,
                device=options.device,
                new_tokens=condition.new_tokens,
                temperature=condition.temperature,
                max_rows=options.max_rows,
            )
            try:
                bench = Bench(Arena(settings, folder, threading.Event()), options.makers)
            except ValueError as error:
                print(f"{condition.name:<18} cannot be calibrated: {error}", flush=True)
                continue
            cells = {
                f"{maker} to {path}": judged
                for maker in (*options.makers, UNKNOWN)
                for path, judged in bench.judge(maker, options.submissions).items()
            }
            for pair, judged in cells.items():
                totals.setdefault(pair, Judged()).add(judged)
            results[condition.name] = {
                pair: {"codes": dict(judged.codes), "scores": judged.scores} for pair, judged in cells.items()
            }
            print(
                f"{condition.name:<18} {f'to {bench.widest.token_sizes[-1]}':>9}   "
                + ", ".join(f"{pair}: {one.refused}, {one.void}" for pair, one in cells.items()),
                flush=True,
            )
    for pair, judged in totals.items():
        low, high = wilson(judged.refused / judged.codes.total(), judged.codes.total())
        print(
            f"{pair}: {judged.refused} refused of {judged.codes.total()}, 95 % interval {low:.3%} to {high:.3%}; {judged.void} void; "
            f"largest score {max(judged.scores):.2f} of its bound, extrapolated rate {judged.extrapolated():.1e}"
        )
    print(f"{time.monotonic() - began_s:.0f} s, {time.process_time():.0f} s of processor time")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
