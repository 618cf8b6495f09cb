"""Started by torchrun in test_ranks.py: one learner on all ranks, three steps per configuration; rank 0 saves the results."""

import json
import os
import sys
import threading
from pathlib import Path

import torch
from tiny_learner import make_batch

from shoal.diloco.ranks import Ranks, as_lost_rank, join_ranks
from shoal.net.waiting import DeadlinePassed
from shoal.shardcast.adapter_delta import AdapterMatrices
from shoal.telemetry import Log
from shoal.trainer.config import TrainerConfig
from shoal.trainer.distributed.lockstep import Lockstep
from shoal.trainer.io.checkpoint import Checkpoint, Checkpoints
from shoal.trainer.optim.learner import Learner

NUM_STEPS = 3


def rounded_weights(lockstep: Lockstep) -> dict[str, torch.Tensor]:
    whole = lockstep.whole_weights(lockstep.weights())
    return {name: tensor.to(torch.bfloat16, copy=True) for name, tensor in whole}


def take_over(
    lockstep: Lockstep, adapters: list[AdapterMatrices], published: dict[str, torch.Tensor]
) -> None:
    """Takes over published weights in place of those of an earlier version."""
    if adapters:
        lockstep.take_adapters(adapters)
    else:
        lockstep.take_weights(lambda name: published[name])
    taken = rounded_weights(lockstep)
    differing = sum(int((taken[name] != one).sum()) for name, one in published.items())
    assert differing <= len(adapters), "two scales of an adapter may round differently than their product"


def train(lockstep: Lockstep, model: Path, folder: Path) -> dict[str, object]:
    """Makes three steps with a checkpoint after the first, then resumes from it and repeats the other two."""
    lockstep.create_learner(model)
    kept = Checkpoints(folder, keep=2, log=Log("trainer"))
    figures = [lockstep.step(make_batch(0))]
    kept.begin(1, lockstep.later_snapshot(kept.shard_folder(1)), None)
    kept.finish(60)
    figures += [lockstep.step(make_batch(version)) for version in range(1, NUM_STEPS)]
    last = lockstep.snapshot()
    published = rounded_weights(lockstep)
    checkpoint = kept.newest()
    assert checkpoint is not None
    adapters = lockstep.adapters
    lockstep.load_checkpoint(checkpoint)
    take_over(lockstep, adapters, published)
    lockstep.load_checkpoint(checkpoint)
    again = [lockstep.step(make_batch(version)) for version in range(1, NUM_STEPS)]
    assert [one.loss for one in again] == [one.loss for one in figures[1:]]
    assert all(torch.equal(one, last.weights[name]) for name, one in lockstep.snapshot().weights.items())
    return {
        "figures": [(one.loss, one.grad_norm, one.clip_fraction, one.logprob_gap) for one in figures],
        "weights": last.weights,
        "published": published,
    }


def continue_from(checkpoint: Checkpoint, lockstep: Lockstep, model: Path, out: Path) -> None:
    """Continues from the checkpoint of a single process and saves the losses."""
    lockstep.create_learner(model)
    lockstep.load_checkpoint(checkpoint)
    losses = [lockstep.step(make_batch(version)).loss for version in range(1, NUM_STEPS)]
    out.write_text(json.dumps(losses))


def main(model: str, out: str) -> None:
    torch.set_num_threads(1)
    ranks = join_ranks(
        rank=int(os.environ.get("RANK", "0")),
        size=int(os.environ.get("WORLD_SIZE", "1")),
        device="cpu",
        command_timeout_s=60,
    )
    for name, keys in json.loads((Path(out) / "configs.json").read_text()).items():
        lockstep = Lockstep(
            TrainerConfig(**keys), ranks, device="cpu", log=Log("trainer"), stop=threading.Event()
        )
        if not ranks.leads:
            lockstep.follow()
            continue
        folder = Path(out) / f"{name}-{ranks.size}"
        own = Path(out) / f"{name}.model"
        single = Checkpoints(Path(out) / "single", keep=2, log=Log("trainer")).newest()
        if name == "plain" and single is not None:
            continue_from(single, lockstep, Path(model), Path(out) / f"continued-{ranks.size}.json")
        torch.save(train(lockstep, own if own.exists() else Path(model), folder), folder.with_suffix(".pt"))
        lockstep.end("finished")
    if ranks.size > 1:
        lose_one(ranks, Path(model), Path(out))


def lose_one(ranks: Ranks, model: Path, out: Path) -> None:
    """The last rank exits in the middle of a step; the others must raise RankLost."""
    lockstep = Lockstep(TrainerConfig(), ranks, device="cpu", log=Log("trainer"), stop=threading.Event())
    if not ranks.leads:
        Learner.step = lambda *_: os._exit(0)  # type: ignore[method-assign]
        lockstep.follow()
    lockstep.create_learner(model)
    try:
        lockstep.step(make_batch(0))
    except (RuntimeError, DeadlinePassed) as error:
        explained = as_lost_rank(error, ranks) if isinstance(error, RuntimeError) else error
        (out / "lost.txt").write_text(f"{type(explained).__name__}: {explained}")
    os._exit(0)  # the process group cannot be closed without the lost rank


if __name__ == "__main__":
    main(*sys.argv[1:])
