"""Makes a learner of the tiny model, and random samples for it."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from shoal.model.builtin import create_model
from shoal.model.load_model import load_decoder
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.batch import TrainBatch, TrainSample
from shoal.trainer.data.pack import MicroBatch
from shoal.trainer.io.checkpoint import Checkpoints, take_snapshot
from shoal.trainer.optim.learner import Learner
from shoal.trainer.optim.policy import Causal, TrainerPolicy, score
from shoal.wire.messages import StepReport

VOCAB = 80
CONFIG = TrainerConfig(learning_rate=1e-3, warmup_steps=2, row_tokens=48, rows_per_micro_batch=2)


def make_model(folder: Path) -> Path:
    if not folder.exists():
        create_model("tiny", folder, seed=7)
    return folder


def make_learner(model: Path, config: TrainerConfig = CONFIG) -> Learner:
    return Learner(load_decoder(model), config)


def output_logprobs(model: TrainerPolicy | Causal, micro: MicroBatch) -> Tensor:
    """Returns the log-prob of every output token of a micro-batch, with gradient."""
    scores = model.scores(micro) if isinstance(model, TrainerPolicy) else score(model, micro)
    return scores.logprobs_N


def make_sample(rng: random.Random, *, lag: int = 0) -> TrainSample:
    prompt_len, num_outputs = rng.randint(1, 9), rng.randint(1, 12)
    return TrainSample(
        tokens=tuple(rng.randrange(VOCAB) for _ in range(prompt_len + num_outputs)),
        prompt_len=prompt_len,
        logprobs=tuple(-rng.uniform(3.5, 5.5) for _ in range(num_outputs)),
        advantage=rng.gauss(0, 1),
        lag=lag,
        temperature=0.8,
    )


def make_batch(
    version: int, num_samples: int = 12, temperatures: tuple[float, float] = (0.8, 0.8)
) -> TrainBatch:
    """Returns a batch of two groups, each with its temperature."""
    rng = random.Random(version)
    return TrainBatch(
        version=version,
        samples=tuple(
            replace(
                make_sample(rng, lag=rng.choice([0, 1])),
                group=(group := 2 * index // num_samples),
                temperature=temperatures[group],
            )
            for index in range(num_samples)
        ),
        num_groups=2,
    )


def save(checkpoints: Checkpoints, learner: Learner, report: StepReport | None) -> None:
    """Writes a checkpoint of a single process's learner and waits for it."""
    checkpoints.begin(learner.version, partial(take_snapshot, learner), report)
    checkpoints.finish(900.0)
