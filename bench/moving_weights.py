"""Measures how far weights may move before a calibration of the first version misjudges honest work or misses lies.

    python bench/moving_weights.py

Trains `tiny` on a task's own answers with a high rate, which moves weights further than reinforcement learning does. Versions on the
way are calibrated as a bfloat16 run calibrates itself. Fresh submissions of each version, honest and by 8-bit weights, are judged
by the calibration of the first version and by the version's own.
"""

import argparse
import hashlib
import itertools
import math
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from shoal.cli.commands.toploc import (
    CalibratedTask,
    _check,
    _generate,
    _measured_pair,
    _noise_of,
    _spread_lengths,
    _task_requests,
)
from shoal.model.builtin import copy_all_but_weights, create_model
from shoal.model.load_model import load_decoder
from shoal.model.tokenizer import load_tokenizer
from shoal.model.weights import WEIGHTS_FILE, save_weights
from shoal.rollout.adversary.lying_engines import AlteredEngine, quantised_by_channel, quantised_in_blocks
from shoal.rollout.engine.api import Engine
from shoal.rollout.engine.selection import AutoEngine, compute_class
from shoal.swarm.validator import fact_checks
from shoal.swarm.validator.prefill import LoadedPolicy
from shoal.swarm.validator.recompute import CalibrationTerms
from shoal.tasks import Task, make_task
from shoal.telemetry import Log
from shoal.trainer.config import TrainerConfig
from shoal.trainer.optim.learner import Learner
from shoal.trainer.optim.supervised import warm_up
from shoal.wire.codes import ACCEPTED, Rejected
from shoal.wire.proof_noise import Noise
from shoal.wire.run_spec import ProofSpec, Sampling, TaskSpec, default_tolerances

SEED = hashlib.sha256(b"shoal toploc prove").hexdigest()
"""The seed of `_task_requests`."""
PER_SUBMISSION, NEW_TOKENS = 16, 24
TASK = CalibratedTask(TaskSpec(name="sort"), temperature=1.0)
KINDS: dict[str, Callable[[Engine], Engine]] = {
    "honest": lambda engine: engine,
    "int8": lambda engine: AlteredEngine(engine, lambda weight: quantised_by_channel(weight, bits=8)),
    "q8": lambda engine: AlteredEngine(engine, quantised_in_blocks),
}
TERMS = CalibrationTerms(SEED, Sampling(max_new_tokens=NEW_TOKENS, samples_per_prompt=4), ProofSpec())


class Version:
    """A model on the way of the training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.policy = LoadedPolicy(0, load_decoder(folder, torch.bfloat16), load_tokenizer(folder))
        self.made_by = compute_class(self._engine("honest"), device="cpu", compute_dtype="bfloat16")

    def _engine(self, kind: str) -> Engine:
        engine = KINDS[kind](
            AutoEngine(compute_dtype="bfloat16", proof=ProofSpec(), max_rows=64, device="cpu")
        )
        engine.load(self.folder, 0)
        return engine

    def calibrate(self, rows: int) -> Noise:
        engine = AutoEngine(compute_dtype="bfloat16", proof=ProofSpec(), max_rows=64, device="cpu")
        engine.load(self.folder, 0)
        requests = _spread_lengths(_task_requests(engine, TASK, rows, NEW_TOKENS))
        table = _generate(engine, requests, self.made_by, threading.Event())
        facts = _check(table, self.policy, TERMS, threading.Event())
        return _noise_of(
            [_measured_pair(table, facts, table.made_by, self.policy)], "tiny", "bfloat16", TERMS
        )

    def judge(self, kind: str, submissions: int, noises: dict[str, Noise], skip: int) -> dict[str, str]:
        """Returns, by calibration: refused, void of the submissions, and the mean standard score of each statistic."""
        engine = self._engine(kind)
        requests = _task_requests(engine, TASK, skip + submissions * PER_SUBMISSION, NEW_TOKENS)[skip:]
        table = _generate(engine, requests, self.made_by, threading.Event())
        facts = _check(table, self.policy, TERMS, threading.Event())
        found = {}
        for name, noise in noises.items():
            codes, scores = [], []
            for start in range(0, len(table.rows), PER_SUBMISSION):
                rows, own = table.rows[start : start + PER_SUBMISSION], facts[start : start + PER_SUBMISSION]
                try:
                    fact_checks.check_facts(rows, own, default_tolerances("bfloat16"), noise)
                    codes.append(ACCEPTED)
                except Rejected as rejected:
                    codes.append(rejected.code)
                scores += [
                    one for one in fact_checks.score_facts(rows, own, noise) if one.standard is not None
                ]
            refused = sum(code.startswith("reject.") for code in codes)
            void = sum(code.startswith("void.") for code in codes)
            by_name: dict[str, list[float]] = {}
            for one in scores:
                by_name.setdefault(one.statistic, []).append(one.standard or 0.0)
            means = ", ".join(f"{statistic} {np.mean(values):.1f}" for statistic, values in by_name.items())
            found[name] = f"{refused}, {void} ({means})"
        return found


def train(folder: Path, task: Task, steps: Sequence[int]) -> list[Path]:
    """Returns the folders of version 0 and of the versions after so many supervised steps."""
    create_model("tiny", folder / "0", seed=0)
    tokenizer, decoder = load_tokenizer(folder / "0"), load_decoder(folder / "0")
    found = [folder / "0"]
    for before, after in itertools.pairwise((0, *steps)):
        config = TrainerConfig(
            supervised_steps=after - before, supervised_learning_rate=3e-3, row_tokens=128, seed=after
        )
        warm_up(
            Learner(decoder, config),
            [task],
            tokenizer,
            log=Log("bench"),
            stop=threading.Event(),
        )
        found.append(folder / str(after))
        found[-1].mkdir()
        copy_all_but_weights(folder / "0", found[-1])
        save_weights(decoder, found[-1] / WEIGHTS_FILE)
    return found


def distance(folder: Path, first: Path) -> float:
    """Returns how far the weights have moved, as a share of the norm of the first ones."""
    pairs = zip(load_decoder(folder).parameters(), load_decoder(first).parameters(), strict=True)
    moved, norm = 0.0, 0.0
    for now, then in pairs:
        moved += float((now - then).detach().square().sum())
        norm += float(then.detach().square().sum())
    return math.sqrt(moved / norm)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--submissions", type=int, default=32, help="of each kind and version (default: 32)")
    parser.add_argument("--rows", type=int, default=1024, help="rows of a calibration (default: 1024)")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 7, 10, 40, 160])
    options = parser.parse_args()
    began_s, task = time.monotonic(), make_task(TASK.spec)
    print(f"refused, void of {options.submissions} submissions, and mean standard scores", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folders = train(Path(scratch), task, options.steps)
        first = Version(folders[0]).calibrate(options.rows)
        for steps, folder in zip((0, *options.steps), folders, strict=True):
            version = Version(folder)
            noises = {"first": first, "own": version.calibrate(options.rows) if steps else first}
            for kind in KINDS:
                found = version.judge(kind, options.submissions, noises, skip=options.rows)
                for name, text in found.items():
                    print(
                        f"step {steps:>4}, moved {distance(folder, folders[0]):6.1%}  {kind:6} by the {name:5} calibration: {text}",
                        flush=True,
                    )
    print(f"{time.monotonic() - began_s:.0f} s, {time.process_time():.0f} s of processor time")


if __name__ == "__main__":
    main()
