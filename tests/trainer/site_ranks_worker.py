"""Started by torchrun in test_sites.py: a trainer site of two ranks; a second site of one rank trains in a thread of rank 0."""

import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import torch
from tiny_learner import CONFIG, make_batch, make_learner

from shoal.background import BackgroundTask
from shoal.diloco.averaging.averager import AveragerSettings
from shoal.diloco.averaging.peers import PeerAverager
from shoal.diloco.ranks import Ranks, join_ranks
from shoal.diloco.transport.mesh import LocalHub
from shoal.telemetry import Log, Metrics
from shoal.trainer.config import DilocoConfig
from shoal.trainer.data.batch import TrainBatch
from shoal.trainer.distributed.lockstep import Lockstep
from shoal.trainer.distributed.sites import Sites
from shoal.trainer.io.checkpoint import Checkpoints
from shoal.trainer.optim.learner import Learner

DILOCO = DilocoConfig(inner_steps=2, codec="fp32", deadline_s=120.0)
STEPS = 4


def peer(hub: LocalHub) -> PeerAverager:
    settings = AveragerSettings(gather_s=60.0, min_peers=2, announce_s=0.2)
    return PeerAverager(hub.mesh(), log=Log("test"), codec="fp32", settings=settings)


def batch_of(site: int, version: int) -> TrainBatch:
    return replace(make_batch(100 * site + version), version=version)


def train_other_site(learner: Learner) -> None:
    for version in range(STEPS):
        learner.step(batch_of(1, version), threading.Event())


def main(model: str, folder: str) -> Ranks:
    torch.set_num_threads(1)
    out, config = Path(folder), CONFIG.model_copy(update={"diloco": DILOCO})
    ranks = join_ranks(
        rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]), device="cpu", command_timeout_s=120
    )
    lockstep = Lockstep(config, ranks, device="cpu", log=Log("trainer"), stop=threading.Event())
    if not ranks.leads:
        lockstep.follow()
        return ranks
    hub, metrics = LocalHub(), Metrics(out / "metrics.jsonl")
    lockstep.create_learner(Path(model))
    sites = lockstep.create_sites(peer(hub), metrics=metrics, stop=threading.Event())
    other = make_learner(Path(model), config)
    other.sites = others = Sites(other, DILOCO, peer(hub), metrics=None, stop=threading.Event())
    lockstep.join_sites(sites)
    others.join()
    beside = BackgroundTask("other site", lambda: train_other_site(other))
    for version in range(STEPS):
        lockstep.step(batch_of(0, version))
    weights = lockstep.snapshot().weights
    beside.wait()
    beside.result()
    assert all(torch.equal(one, weights[name]) for name, one in other.trained_parameters().items())
    check_resume(lockstep, sites, out / "checkpoints")
    torch.save(weights, out / "sharded.pt")
    sites.close()
    others.close()
    lockstep.end("finished")
    return ranks


def check_resume(lockstep: Lockstep, sites: Sites, folder: Path) -> None:
    """A checkpoint of several ranks has the outer state, and loading it changes no weight."""
    kept = Checkpoints(folder, keep=2, log=Log("trainer"))
    kept.begin(STEPS, lockstep.later_snapshot(kept.shard_folder(STEPS)), None)
    kept.finish(60)
    before = lockstep.snapshot()
    checkpoint = kept.newest()
    assert checkpoint is not None
    lockstep.load_checkpoint(checkpoint)
    assert before.outer is not None
    assert sites._diloco.outer_state.round == before.outer["round"] == 2
    assert all(torch.equal(one, before.weights[name]) for name, one in lockstep.snapshot().weights.items())


if __name__ == "__main__":
    ranks = main(*sys.argv[1:])
    ranks.leave()
    ranks.release()
