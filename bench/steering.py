"""Measures what steering the draw is worth and when it is convicted. `python bench/economics.py steering` runs it.

`tiny` is trained to a reward of about one half and then generates in bfloat16, as a run that starts from it would. A run calibrates
itself with 512 honest rows; the validator's own code judges every submission, and the coordinator's own rule adds up the scores.

The liar knows the right answer of every problem. Where the token that it wants lies within `reach` of the uniform random number, it takes
that token instead of the drawn one, and the model continues from there. States, proofs and log-probs are the model's own.
"""

import contextlib
import hashlib
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from one_loop import OneLoop

from shoal.model.builtin import create_model
from shoal.model.load_model import DTYPES, load_decoder
from shoal.model.tokenizer import load_tokenizer
from shoal.model.weights import save_weights
from shoal.rollout.adversary.lying_engines import AlteredEngine, quantised_by_channel
from shoal.rollout.adversary.practice import practice_lease
from shoal.rollout.engine import step_cpu
from shoal.rollout.engine.api import Engine, make_requests, make_table
from shoal.rollout.engine.sampling import draw_tokens
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.swarm.coordinator.rules import cumulative_evidence
from shoal.swarm.coordinator.rules.cumulative_evidence import TESTS, THRESHOLDS, Sums
from shoal.swarm.validator.judge import judge
from shoal.swarm.validator.prefill import LoadedPolicy
from shoal.swarm.validator.table_reader import TableReader
from shoal.tasks import make_task
from shoal.trainer.config import TrainerConfig
from shoal.wire.codes import ACCEPTED
from shoal.wire.lease import Lease, Verdict
from shoal.wire.messages import Claim
from shoal.wire.proof_noise import Noise
from shoal.wire.rollouts import encode
from shoal.wire.run_spec import RunSpec, Sampling, TaskSpec, default_tolerances
from shoal.wire.seeded_draw import problem_seeds, sample_seed, uniforms

TASK = TaskSpec(name="sort", options={"length": 4, "partial": 0.5})
PROMPTS, SAMPLES, NEW_TOKENS = 8, 16, 8
"""A lease of the demo."""
RUN_FILE = """
[run]
name = "steering"
model = "{model}"
compute_dtype = "bfloat16"
last_version = 1
[task]
name = "sort"
options = {{ length = 4, partial = 0.5 }}
[sampling]
max_new_tokens = 8
samples_per_prompt = 16
"""
LIFE = 200
Floats = npt.NDArray[np.float64]


def train_tiny(folder: Path, *, steps: int, seed: int) -> None:
    """Writes a `tiny` that solves about half of the problems."""
    config = TrainerConfig(
        learning_rate=3e-4, supervised_steps=20, row_tokens=64, rows_per_micro_batch=64, seed=seed
    )
    loop = OneLoop(config, lag=0, groups=8, samples=16)
    loop.run(steps)
    create_model("tiny", folder, seed)
    save_weights(loop.decoder, folder / "model.safetensors")


@dataclass
class Judged:
    """The results of one submission."""

    code: str
    reward: float
    evidence: dict[str, Any]


class Steerer:
    """Makes and judges submissions with one model."""

    def __init__(self, folder: Path, reader: TableReader) -> None:
        self.reader, self.number = reader, 0
        self.task = make_task(TASK)
        self.spec = RunSpec(
            run="steering",
            task=TASK,
            compute_dtype="bfloat16",
            sampling=Sampling(max_new_tokens=NEW_TOKENS, samples_per_prompt=SAMPLES),
            tolerances=default_tolerances("bfloat16"),
            last_version=1,
        )
        self.folder = folder
        self.engine = TorchEngine(compute_dtype="bfloat16", proof=self.spec.proof, max_rows=PROMPTS * SAMPLES)
        self.engine.load(folder, 0)
        decoder = load_decoder(folder, DTYPES["bfloat16"])
        self.policy = LoadedPolicy(0, decoder, load_tokenizer(folder))

    def calibrate(self) -> None:
        """Measures honest noise as a run does before its first lease."""
        run_file, noise = self.folder.parent / "run.toml", self.folder.parent / "noise.json"
        run_file.write_text(RUN_FILE.format(model=self.folder))
        command = [
            sys.executable,
            "-m",
            "shoal",
            "toploc",
            "calibrate-run",
            str(run_file),
            "--out",
            str(noise),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        self.spec = self.spec.model_copy(update={"noise": Noise.model_validate_json(noise.read_bytes())})

    def lease(self, number: int) -> Lease:
        return practice_lease(
            "steering",
            f"steering/{number}",
            task=TASK,
            sampling=self.spec.sampling,
            proof=self.spec.proof,
            num_prompts=PROMPTS,
        )

    def submission(
        self, number: int, *, reach: float = 0.0, share: float = 1.0, int8: bool = False
    ) -> Judged:
        """Returns the verdict on lease `number`, steered within `reach` in a share of its rows."""
        lease = self.lease(number)
        engine: Engine = self.engine
        if int8:
            engine = AlteredEngine(engine, lambda weight: quantised_by_channel(weight, bits=8))
            engine.load(self.folder, 0)
        with steered(self._targets(lease, share), reach) if reach else contextlib.nullcontext():
            table = self._table(lease, engine)
        if int8:
            self.engine.load(self.folder, 0)
        data = encode(table)
        claim = Claim(
            lease=lease,
            policy_version=0,
            sha256=hashlib.sha256(data).hexdigest(),
            num_bytes=len(data),
            received_at_s=0.0,
            deadline_s=1e12,
            copy_of=None,
        )
        verdict: Verdict = judge(data, claim, self.spec, self.policy, reader=self.reader, control_seed=number)
        rewards = verdict.rewards or self._rewards(lease, table.rows)
        return Judged(verdict.code, fmean(rewards), dict(verdict.evidence))

    def _table(self, lease: Lease, engine: Engine) -> Any:
        engine.submit(make_requests(lease, engine.tokenizer))
        finished = []
        while engine.has_work:
            finished += engine.step()
        pairs = self.spec.noise.pairs if self.spec.noise is not None else ()
        return make_table(lease, 0, finished, made_by=pairs[0].made_by if pairs else "")

    def _problems(self, lease: Lease) -> list[Any]:
        seeds = problem_seeds(lease.seed, run="steering", purpose="train", chunk=0, num_prompts=PROMPTS)
        return [self.task.problem("train", seed) for seed in seeds]

    def _rewards(self, lease: Lease, rows: Sequence[Any]) -> list[float]:
        problems, decode = self._problems(lease), self.policy.tokenizer.decode
        return [
            self.task.reward(
                problems[row.prompt_index], decode(row.output_tokens), len(row.output_tokens)
            ).value
            for row in rows
        ]

    def _targets(self, lease: Lease, share: float) -> dict[float, list[int]]:
        """Returns the right answers of the rows to steer, by the first uniform of each row."""
        answers = [self.policy.tokenizer.encode_answer(one.answer) for one in self._problems(lease)]
        places = [(p, s) for p in range(PROMPTS) for s in range(SAMPLES)]
        seeds = np.array([sample_seed(lease.seed, p, s) for p, s in places], dtype=np.uint64)
        first = uniforms(seeds, np.zeros(len(seeds), dtype=np.uint64))
        chosen = int(share * SAMPLES)
        return {float(u): answers[p] for u, (p, s) in zip(first, places, strict=True) if s < chosen}


@contextlib.contextmanager
def steered(targets: dict[float, list[int]], reach: float) -> Iterator[None]:
    """Replaces the engine's draw of the rows in `targets`."""

    def draw(self: step_cpu.CpuStep, logits_RV: torch.Tensor, slots_R: torch.Tensor) -> None:
        slots = self.slots
        num_drawn_R = slots.num_drawn_S[slots_R]
        uniforms_R = slots.uniforms_SN[slots_R, num_drawn_R]
        cumulative_RV = logits_RV.float().softmax(-1).double().cumsum(-1)
        moved_R = uniforms_R.clone()
        for row, slot in enumerate(slots_R.tolist()):
            answer, at = targets.get(float(slots.uniforms_SN[slot, 0])), int(num_drawn_R[row])
            if answer is None or at >= len(answer):
                continue
            low = float(cumulative_RV[row, answer[at] - 1]) if answer[at] else 0.0
            high, point = float(cumulative_RV[row, answer[at]]), float(uniforms_R[row])
            if max(low - point, point - high, 0.0) <= reach:
                moved_R[row] = min(max(point, low + (high - low) * 1e-3), high - (high - low) * 1e-3)
        tokens_R, logprobs_R = draw_tokens(logits_RV, slots.temperatures_S[slots_R], moved_R)
        slots.tokens_SN[slots_R, num_drawn_R] = tokens_R
        slots.logprobs_SN[slots_R, num_drawn_R] = logprobs_R
        slots.newest_S[slots_R] = tokens_R
        slots.num_drawn_S[slots_R] = num_drawn_R + 1
        slots.positions_S[slots_R] += 1
        ends_R = self._is_end_V[tokens_R] | (num_drawn_R + 1 >= slots.max_drawn_S[slots_R])
        slots.ended_S[slots_R] = torch.where(ends_R, num_drawn_R + 1, 0)

    with mock.patch.object(step_cpu.CpuStep, "_draw", draw):
        yield


# -- lives ------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """The submissions of one strategy."""

    name: str
    judged: list[Judged]

    @property
    def reward(self) -> float:
        return fmean(one.reward for one in self.judged)

    def scores(self) -> Floats:
        """Returns [submissions, tests] the scores that the coordinator would add up; 0 for a refused submission."""
        found = [cumulative_evidence.scores_of(one.code, one.evidence) for one in self.judged]
        return np.array([[scores.get(name, 0.0) for name in TESTS] for scores in found])

    def refused(self) -> npt.NDArray[np.bool_]:
        return np.array([one.code.startswith("reject.") for one in self.judged])

    def accepted(self) -> npt.NDArray[np.bool_]:
        return np.array([one.code == ACCEPTED for one in self.judged])


def baseline_of(honest: Measured) -> Sums:
    """Returns the run's baseline after many honest submissions: the median of each calibrated score, at least 0."""
    median = np.median(honest.scores(), axis=0)
    named = dict(zip(TESTS, median, strict=True))
    return {name: max(0.0, float(named[name])) for name in cumulative_evidence.CALIBRATED}


def live(measured: Measured, baseline: Sums, *, lives: int, length: int, seed: int) -> npt.NDArray[np.int64]:
    """Returns after how many submissions each life is convicted, or `length` + 1. Submissions are drawn with replacement."""
    draw = np.random.default_rng(seed)
    scores_ST, refused_S = measured.scores(), measured.refused()
    base_T = np.array([baseline.get(name, 0.0) for name in TESTS])
    clip_T, drift_T = (
        np.array([getattr(test, what) for test in TESTS.values()]) for what in ("clip", "drift")
    )
    limit_T = np.array([THRESHOLDS[name] for name in TESTS])
    sums_LT = np.zeros((lives, len(TESTS)))
    ended_L = np.full(lives, length + 1)
    for number in range(1, length + 1):
        chosen_L = draw.integers(0, len(scores_ST), lives)
        step_LT = np.minimum(scores_ST[chosen_L] - base_T, clip_T) - drift_T
        sums_LT = np.maximum(0.0, sums_LT + step_LT)
        convicted_L = (sums_LT > limit_T).any(1) | refused_S[chosen_L]
        ended_L = np.where(convicted_L, np.minimum(ended_L, number), ended_L)
    return ended_L


def report(options: Any) -> bool:
    """Prints the table and returns whether the aims hold."""
    torch.set_num_threads(1)
    reaches = [0.001, 0.0015, 0.002, 0.0025, 0.003, 0.005, 0.01, 0.02]
    with tempfile.TemporaryDirectory() as name, TableReader() as reader:
        folder = Path(name) / "tiny"
        train_tiny(folder, steps=options.steps, seed=options.seed)
        steerer = Steerer(folder, reader)
        steerer.calibrate()
        honest = Measured("honest", [steerer.submission(n) for n in range(options.honest)])
        strategies = [
            Measured(
                f"steered within {reach:g}",
                [steerer.submission(n, reach=reach) for n in range(options.submissions)],
            )
            for reach in reaches
        ]
        strategies.append(
            Measured(
                "steered within 0.03, a quarter of the rows",
                [steerer.submission(n, reach=0.03, share=0.25) for n in range(options.submissions)],
            )
        )
        int8 = [steerer.submission(n, int8=n % 10 == 0) for n in range(options.submissions)]
        strategies.append(Measured("int8 in one of ten", int8))
    usual = fmean(one.reward for one in honest.judged[: options.submissions])
    print(f"honest: reward {usual:.4f}, verdicts {dict(Counter(one.code for one in honest.judged))}")
    for index, test in enumerate(TESTS):
        scores = honest.scores()[:, index]
        print(f"  {test}: mean {scores.mean():.2f}, variance {scores.var():.2f}, largest {scores.max():.2f}")
    held = True
    for name, baseline in (("first submissions of a run", {}), ("later", baseline_of(honest))):
        ended = live(honest, baseline, lives=options.lives, length=LIFE, seed=1)
        convicted = int((ended <= LIFE).sum())
        held &= convicted == 0
        print(f"honest lives of {LIFE} submissions convicted ({name}): {convicted} of {options.lives}")
    print(
        "| strategy | reward | a submission gains | mean score of draws | verdicts | convicted | after, median | gain of a life |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for one in strategies:
        ended = live(one, baseline_of(honest), lives=2000, length=LIFE, seed=2)
        # A void submission is not trained on and gains nothing.
        gain = one.accepted().mean() * (one.reward - usual) / usual
        kept = np.minimum(ended - 1, LIFE).mean() / LIFE
        held &= bool(gain * kept < 0.02)
        draws = float(one.scores()[:, list(TESTS).index("draws")].mean())
        codes = ", ".join(f"{code} {count}" for code, count in Counter(j.code for j in one.judged).items())
        convicted_share = (ended <= LIFE).mean()
        median = f"{np.median(ended[ended <= LIFE]):.0f}" if convicted_share else "–"
        print(
            f"| {one.name} | {one.reward:.4f} | {gain:+.1%} | {draws:.2f} | {codes} | {convicted_share:.0%} | {median} | "
            f"{gain * kept:+.2%} |"
        )
    return held
