"""Measures lies in a part of a submission: how many rows by rounded weights, or how many forced tokens, are refused or void?

    python bench/partial_lies.py
    python bench/partial_lies.py --model FOLDER --device cuda --task add --submissions 16

A submission has --prompts prompts with 4 answers each. Of --rows-by-lie its first rows are made by the lie's weights, evenly spread
over the submission, and the rest is honest. A forced token is the second likeliest at one place of an answer, fed to the right model;
each is in another answer. Everything is judged by the validator's code, with a calibration of honest rows made first.
"""

import argparse
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from shoal.cli.arena import contest
from shoal.cli.arena.contest import Arena, ArenaSettings, sent_states
from shoal.cli.arena.own_decision import row_facts
from shoal.cli.arena.schemes import PublishedToploc, verify
from shoal.cli.commands.sample_answers import model_folder
from shoal.rollout.adversary.adaptive import Adapted, PlainEngine
from shoal.rollout.engine.api import Behaviour
from shoal.rollout.engine.sampling import draw_tokens
from shoal.swarm.validator import fact_checks
from shoal.swarm.validator.recompute import RowsToCheck
from shoal.wire.codes import ACCEPTED, Rejected
from shoal.wire.lease import Lease
from shoal.wire.proof_noise import Noise
from shoal.wire.rollouts import RolloutTable

PLACE = 3
"""The token of an answer that is forced."""


class ForcedEngine(PlainEngine):
    """Forces one token in the first rows of each submission."""

    forced, rows = 0, 1

    def draw(self, logits_BV: Tensor, temperatures_B: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
        self.step_number += 1
        tokens_B, logprobs_B = draw_tokens(logits_BV, temperatures_B, uniforms_B)
        if self.step_number != PLACE:
            return tokens_B, logprobs_B
        second_B = logits_BV.topk(2).indices[:, 1]
        forced_B = torch.arange(len(tokens_B), device=tokens_B.device) % self.rows < self.forced
        tokens_B = torch.where(forced_B, second_B, tokens_B)
        all_BV = torch.log_softmax(logits_BV / temperatures_B[:, None], dim=-1)
        return tokens_B, all_BV.gather(1, tokens_B[:, None]).squeeze(1)

    def _generate(self, requests):  # type: ignore[no-untyped-def]
        self.step_number = 0
        return super()._generate(requests)


def make_forced(forced: int, rows: int, **settings: object) -> ForcedEngine:
    engine = ForcedEngine(**settings)  # type: ignore[arg-type]
    engine.forced, engine.rows = forced, rows
    return engine


def verdicts(
    arena: Arena, noise: Noise, tables: Sequence[RolloutTable], leases: Sequence[Lease]
) -> Counter[str]:
    rows = arena.check([RowsToCheck(table.rows, lease) for table, lease in zip(tables, leases, strict=True)])
    width = rows[0].states_TH.shape[1]
    checks = verify(
        rows, PublishedToploc().commit([sent_states(row, width) for row in rows]), PublishedToploc.proof
    )
    facts = [row_facts(row, segments) for row, segments in zip(rows, checks, strict=True)]
    found, first = Counter[str](), 0
    for table in tables:
        some = slice(first, first + len(table.rows))
        first += len(table.rows)
        try:
            fact_checks.check_facts(table.rows, facts[some], arena.tolerances, noise)
            found[ACCEPTED] += 1
        except Rejected as rejected:
            found[rejected.code] += 1
    return found


def mixed(honest: RolloutTable, lie: RolloutTable, count: int) -> RolloutTable:
    """Returns the honest table with `count` rows of the lie, evenly spread."""
    size = len(honest.rows)
    taken = {place * size // count for place in range(count)} if count else set()
    rows = [lie.rows[place] if place in taken else honest.rows[place] for place in range(size)]
    return replace(honest, rows=tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--task", default="sort")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--submissions", type=int, default=16, help="of each line")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--rows-by-lie", type=int, nargs="+", default=[0, 4, 8, 16, 24, 32, 48, 64])
    parser.add_argument("--forced", type=int, nargs="+", default=[1, 2, 4, 6, 10, 16])
    options = parser.parse_args()
    contest.PROMPTS = options.prompts
    rows = options.prompts * contest.SAMPLES
    with model_folder(options.model) as folder, torch.inference_mode():
        settings = ArenaSettings(
            model=options.model, task=options.task, device=options.device, max_rows=256, calibrate_rows=2048
        )
        arena = Arena(settings, folder, threading.Event())
        noise = arena.calibrate()
        leases = arena.leases(options.submissions)

        def made(behaviour: Behaviour) -> list[RolloutTable]:
            return arena.work(behaviour, arena.engine(behaviour), leases)

        honest = made(Behaviour())
        for name in ("q8-weights", "int8-weights", "int4-weights"):
            lying = made(arena.lies()[name]())
            for count in options.rows_by_lie:
                tables = [mixed(one, other, count) for one, other in zip(honest, lying, strict=True)]
                print(
                    f"{name}, {count} of {rows} rows: {dict(verdicts(arena, noise, tables, leases))}",
                    flush=True,
                )
        for count in options.forced:
            tables = made(Adapted(partial(make_forced, count, rows), device=options.device))
            print(
                f"{count} forced tokens in {rows} rows: {dict(verdicts(arena, noise, tables, leases))}",
                flush=True,
            )


if __name__ == "__main__":
    main()
