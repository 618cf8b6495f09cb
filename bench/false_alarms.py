"""Measures how often honest work is refused or void, by the pair of paths that made and checked it, and by the terms of a run.

    python bench/false_alarms.py
    python bench/false_alarms.py --model smollm2-135m --device cuda --submissions 400 --out alarms.json

Each condition is a run of its own: answers of up to 2, 8, 24, 128 and 2,000 tokens, temperatures 0.6 and 1.2, other tasks with other
prompts. It is calibrated with 512 rows of the worker's engine that are checked by both paths of a validator. Then fresh honest
submissions of 16 rows are judged: those of the measured pairs by the noise of their pair, and those of a class that the calibration
does not have (the plain decoder) by the widest noise, with a second path before a refusal.
"""

import argparse
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shoal import toploc
from shoal.cli.arena.contest import PROMPTS, SAMPLES, Arena, ArenaSettings, sent_states
from shoal.cli.arena.own_decision import row_facts
from shoal.cli.arena.schemes import CheckedRow, PublishedToploc, verify
from shoal.cli.commands.sample_answers import model_folder
from shoal.cli.ui.values import wilson
from shoal.rollout.adversary.adaptive import Adapted, PlainEngine
from shoal.rollout.engine.api import Behaviour
from shoal.swarm.validator import fact_checks
from shoal.swarm.validator.fact_checks import RowFacts
from shoal.swarm.validator.recompute import LoadedPolicy, RowsToCheck
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


CONDITIONS = (
    Condition("24 tokens"),
    Condition("2 tokens", new_tokens=2),
    Condition("8 tokens", new_tokens=8),
    Condition("128 tokens", new_tokens=128),
    Condition("2,000 tokens", new_tokens=2000),
    Condition("temperature 0.6", temperature=0.6),
    Condition("temperature 1.2", temperature=1.2),
    Condition("task add", task="add"),
    Condition("task count", task="count"),
)
Paths = dict[str, LoadedPolicy]


class Bench:
    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.paths: Paths = {"prefill": arena.policy, "plain": replace(arena.policy, plain=True)}
        self.noise: dict[str, Noise] = {}
        self.calibrate()

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

    def calibrate(self) -> None:
        """Measures the noise of both pairs, and of both together."""
        leases = self.arena.leases(ROWS // PER_SUBMISSION)
        tables = self.arena.work(Behaviour(), self.arena.engine(Behaviour()), leases)
        units, prompts = {}, {}
        for path in self.paths:
            rows, facts = self.facts(path, tables, leases)
            units[path] = [
                fact_checks.units_of(row.rollout, fact) for row, fact in zip(rows, facts, strict=True)
            ]
            prompts[path] = [
                PROMPTS * (place // PER_SUBMISSION) + row.rollout.prompt_index
                for place, row in enumerate(rows)
            ]
        dtype = self.arena.settings.dtype
        for name, chosen in {"prefill": ["prefill"], "plain": ["plain"], "": list(units)}.items():
            self.noise[name] = toploc.measure_noise(
                {path: units[path] for path in chosen},
                model=self.arena.settings.model,
                compute_dtype=dtype,
                prompts={path: prompts[path] for path in chosen},
            )

    def judge(self, behaviour: Behaviour, count: int) -> dict[str, Counter[str]]:
        """Returns the verdicts on fresh submissions, by path; of an unknown class if the behaviour has its own engine."""
        leases = self.arena.leases(count)
        tables = self.arena.work(behaviour, self.arena.engine(behaviour), leases)
        found = {path: self.facts(path, tables, leases) for path in self.paths}
        unknown = isinstance(behaviour, Adapted)
        codes: dict[str, Counter[str]] = {path: Counter() for path in self.paths}
        for place in range(count):
            part = slice(place * PER_SUBMISSION, (place + 1) * PER_SUBMISSION)
            of_path = {
                path: self.code(rows[part], facts[part], self.noise["" if unknown else path])
                for path, (rows, facts) in found.items()
            }
            for path, code in of_path.items():
                other = next(one for one in of_path if one != path)
                codes[path][ACCEPTED if unknown and of_path[other] == ACCEPTED else code] += 1
        return codes

    def code(self, rows: list[CheckedRow], facts: list[RowFacts], noise: Noise) -> str:
        try:
            fact_checks.check_facts([row.rollout for row in rows], facts, self.arena.tolerances, noise)
        except Rejected as rejected:
            return rejected.code
        return ACCEPTED


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--submissions", type=int, default=64, help="of each pair and condition")
    parser.add_argument("--max-rows", type=int, default=64)
    parser.add_argument("--conditions", nargs="+", help="only these")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began_s, results, totals = time.monotonic(), {}, dict[str, Counter[str]]()
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
                dtype=options.dtype,
                device=options.device,
                new_tokens=condition.new_tokens,
                temperature=condition.temperature,
                max_rows=options.max_rows,
            )
            bench = Bench(Arena(settings, folder, threading.Event()))
            cells = {}
            for made, behaviour in {
                "torch": Behaviour(),
                "unknown": Adapted(PlainEngine, device=options.device),
            }.items():
                for path, codes in bench.judge(behaviour, options.submissions).items():
                    cells[f"{made} to {path}"] = codes
                    totals.setdefault(f"{made} to {path}", Counter()).update(codes)
            results[condition.name] = {pair: dict(codes) for pair, codes in cells.items()}
            sizes = bench.noise[""].token_sizes
            print(
                f"{condition.name:<18} {f'to {sizes[-1]}':>9}   "
                + ", ".join(f"{pair}: {refused(codes)}, {void(codes)}" for pair, codes in cells.items()),
                flush=True,
            )
    for pair, codes in totals.items():
        low, high = wilson(refused(codes) / codes.total(), codes.total())
        print(
            f"{pair}: {refused(codes)} refused of {codes.total()}, 95 % interval {low:.3%} to {high:.3%}; {void(codes)} void"
        )
    print(f"{time.monotonic() - began_s:.0f} s, {time.process_time():.0f} s of processor time")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


def refused(codes: Counter[str]) -> int:
    return sum(number for code, number in codes.items() if code.startswith("reject."))


def void(codes: Counter[str]) -> int:
    return sum(number for code, number in codes.items() if code.startswith("void."))


if __name__ == "__main__":
    main()
