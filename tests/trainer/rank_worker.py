"""Run by torchrun in test_ranks.py: one learner on all ranks, three steps for each configuration, results of rank 0 kept."""

import json
import os
import sys
import threading
from pathlib import Path

import torch
from tiny_learner import make_batch

from shoal.net.waiting import DeadlinePassed
from shoal.telemetry import Log
from shoal.trainer.config import TrainerConfig
from shoal.trainer.distributed.lockstep import Crew, in_words
from shoal.trainer.distributed.ranks import Ranks, join_ranks
from shoal.trainer.io.checkpoint import Checkpoints

NUM_STEPS = 3


def train(crew: Crew, model: Path, folder: Path) -> dict[str, object]:
    """Three steps with a checkpoint after the first, from which the same crew goes on once more."""
    crew.begin(model, 0.8)
    kept = Checkpoints(folder, keep=2, log=Log("trainer"))
    figures = [crew.step(make_batch(0))]
    kept.begin(crew.capture(), None)
    kept.finish(60)
    figures += [crew.step(make_batch(version)) for version in range(1, NUM_STEPS)]
    last = crew.capture()
    checkpoint = kept.newest()
    assert checkpoint is not None
    crew.resume(checkpoint)
    again = [crew.step(make_batch(version)) for version in range(1, NUM_STEPS)]
    assert [one.loss for one in again] == [one.loss for one in figures[1:]]
    assert all(torch.equal(one, last.weights[name]) for name, one in crew.capture().weights.items())
    return {
        "figures": [(one.loss, one.grad_norm, one.clip_fraction, one.logprob_gap) for one in figures],
        "weights": dict(crew.published(last)),
    }


def main(model: str, out: str) -> None:
    torch.set_num_threads(1)
    ranks = join_ranks(
        rank=int(os.environ.get("RANK", "0")),
        size=int(os.environ.get("WORLD_SIZE", "1")),
        device="cpu",
        speech_s=60,
    )
    for name, keys in json.loads((Path(out) / "configs.json").read_text()).items():
        crew = Crew(TrainerConfig(**keys), ranks, device="cpu", log=Log("trainer"), stop=threading.Event())
        if not ranks.leads:
            crew.follow()
            continue
        folder = Path(out) / f"{name}-{ranks.size}"
        own = Path(out) / f"{name}.model"
        torch.save(train(crew, own if own.exists() else Path(model), folder), folder.with_suffix(".pt"))
        crew.end("finished")
    if ranks.size > 1:
        lose_one(ranks, Path(model), Path(out))


def lose_one(ranks: Ranks, model: Path, out: Path) -> None:
    """The last rank dies in the middle of a step; the others must say so, and soon."""
    crew = Crew(TrainerConfig(), ranks, device="cpu", log=Log("trainer"), stop=threading.Event())
    if not ranks.leads:
        crew._step = lambda batch: os._exit(0)  # type: ignore[method-assign]
        crew.follow()
    crew.begin(model, 0.8)
    try:
        crew.step(make_batch(0))
    except (RuntimeError, DeadlinePassed) as error:
        said = in_words(error, ranks) if isinstance(error, RuntimeError) else error
        (out / "lost.txt").write_text(f"{type(said).__name__}: {said}")
    os._exit(0)  # what remains of the group is of no use to anybody


if __name__ == "__main__":
    main(*sys.argv[1:])
