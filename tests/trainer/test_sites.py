"""Two trainer sites in one process: each trains on its own batches, and after a merge both hold the same weights."""

import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_coordinator import SmallCoordinator
from tiny_learner import CONFIG, make_batch, make_learner, make_model, save

from shoal.diloco.averaging.averager import AveragerSettings
from shoal.diloco.averaging.peers import PeerAverager
from shoal.diloco.transport.hivemind_mesh import PeerAddress
from shoal.diloco.transport.mesh import LocalHub
from shoal.model.builtin import create_model
from shoal.telemetry import Log, Metrics
from shoal.trainer.config import DilocoConfig, TrainerConfig
from shoal.trainer.distributed.sites import Sites, make_averager
from shoal.trainer.io.checkpoint import Checkpoints
from shoal.trainer.io.load_checkpoint import load_checkpoint
from shoal.trainer.loop import run_trainer
from shoal.trainer.optim.learner import Learner

HERE = Path(__file__).parent
DILOCO = DilocoConfig(inner_steps=2, codec="fp32", deadline_s=120.0)


def make_site(hub: LocalHub, model: Path, metrics: Metrics | None = None) -> tuple[Learner, Sites]:
    learner = make_learner(model, CONFIG.model_copy(update={"diloco": DILOCO}))
    averager = PeerAverager(
        hub.mesh(),
        log=Log("test"),
        codec="fp32",
        settings=AveragerSettings(gather_s=60.0, min_peers=2, announce_s=0.2),
    )
    learner.sites = sites = Sites(learner, DILOCO, averager, metrics=metrics, stop=threading.Event())
    return learner, sites


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in learner.decoder.parameters()])


def train(learner: Learner, *, seed: int, steps: int) -> list[torch.Tensor]:
    seen = []
    for _ in range(steps):
        batch = replace(make_batch(100 * seed + learner.version), version=learner.version)
        learner.step(batch, threading.Event())
        seen.append(weights(learner))
    return seen


def test_sites_part_and_meet_again(tmp_path: Path) -> None:
    hub, model = LocalHub(), make_model(tmp_path / "model")
    metrics = Metrics(tmp_path / "metrics.jsonl")
    (one, its), (other, others) = make_site(hub, model, metrics), make_site(hub, model)
    its.join()
    others.join()
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(train, learner, seed=seed, steps=4) for seed, learner in enumerate((one, other))]
        first, second = (job.result(120) for job in jobs)
    same = [torch.equal(a, b) for a, b in zip(first, second, strict=True)]
    assert same == [False, True, False, True], "merged after the second update and the fourth"
    assert one.version == other.version == 4
    its.close()
    others.close()
    metrics.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    merges = [line for line in lines if '"merge"' in line]
    assert len(merges) == 2 and all('"committed"' in line and '"sites": 2' in line for line in merges)


def test_a_merge_moves_by_the_mean_of_both(tmp_path: Path) -> None:
    """The merged weights are the mean of the sites' own, with an outer rate of 1 and no momentum."""
    hub, model = LocalHub(), make_model(tmp_path / "model")
    plain = DilocoConfig(inner_steps=1, codec="fp32", outer_lr=1.0, outer_momentum=0.0, deadline_s=120.0)
    pairs = []
    for seed in range(2):
        alone = make_learner(model)
        train(alone, seed=seed, steps=1)
        learner = make_learner(model)
        averager = PeerAverager(
            hub.mesh(), log=Log("test"), codec="fp32", settings=AveragerSettings(min_peers=2, announce_s=0.2)
        )
        learner.sites = Sites(learner, plain, averager, metrics=None, stop=threading.Event())
        learner.sites.join()
        pairs.append((alone, learner))
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(train, pair[1], seed=seed, steps=1) for seed, pair in enumerate(pairs)]
        merged = [job.result(120)[0] for job in jobs]
    mean = (weights(pairs[0][0]) + weights(pairs[1][0])) / 2
    assert torch.equal(merged[0], merged[1]) and torch.allclose(merged[0], mean, atol=1e-6)
    for _, learner in pairs:
        assert isinstance(learner.sites, Sites)
        learner.sites.close()


def test_the_state_shared_by_sites_is_in_the_checkpoint(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    learner, sites = make_site(LocalHub(), model)
    train_without_others = DILOCO.model_copy(update={"deadline_s": 0.05})
    learner.sites = sites = Sites(
        learner, train_without_others, sites._averager, metrics=None, stop=threading.Event()
    )
    sites.join()
    train(learner, seed=0, steps=3)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2, log=Log("test"))
    save(checkpoints, learner, None)
    again, its = make_site(LocalHub(), model)
    found = checkpoints.newest()
    assert found is not None
    load_checkpoint(again, found)
    ours, theirs = sites.state_dict(), its.state_dict()
    assert ours["round"] == theirs["round"] == 1 and ours["phase"] == theirs["phase"] == 1
    assert torch.equal(ours["bases"][0], theirs["bases"][0])
    assert torch.equal(ours["momenta"][0], theirs["momenta"][0])
    assert torch.equal(weights(learner), weights(again))
    sites.close()
    its.close()
    assert checkpoints.close(30)


def make_peer(hub: LocalHub) -> PeerAverager:
    settings = AveragerSettings(gather_s=60.0, announce_s=0.2)
    return PeerAverager(hub.mesh(), log=Log("test"), codec="fp32", settings=settings)


def test_a_site_whose_newest_checkpoint_is_damaged_repeats_no_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has merged since the checkpoint before, and the other site has gone on: trained again, its weights would be older than the
    state that it takes over, and the next merge would take back the other site's work."""
    hub = LocalHub()
    monkeypatch.setattr("shoal.trainer.loop.make_averager", lambda *_, **__: make_peer(hub))
    config = TrainerConfig(
        learning_rate=1e-3,
        supervised_steps=0,
        row_tokens=32,
        rows_per_micro_batch=4,
        diloco=DILOCO,
    )
    folder = tmp_path / "site"
    with SmallCoordinator(last_version=2).serving() as coordinator, ThreadPoolExecutor(1) as pool:
        site = coordinator.site(folder, deadline_s=60.0)
        create_model("tiny", folder / "model", config.seed)
        other = make_learner(folder / "model", CONFIG.model_copy(update={"diloco": DILOCO}))
        other.sites = others = Sites(other, DILOCO, make_peer(hub), metrics=None, stop=threading.Event())
        others.join()
        began = threading.Event()
        coordinator.before_announce = lambda told: began.set()

        def train_with_the_site() -> None:
            assert began.wait(120)
            train(other, seed=1, steps=2)

        job = pool.submit(train_with_the_site)
        run_trainer(config, site, stop=threading.Event())
        job.result(120)
        train(other, seed=1, steps=2)
        damage_newest(folder)
        run_trainer(config, site, stop=threading.Event())
    found = Checkpoints(folder / "checkpoints", keep=2, log=Log("test")).newest()
    assert found is not None and found.state.version == 2
    again, its = make_site(LocalHub(), folder / "model")
    load_checkpoint(again, found)
    assert its.state_dict()["round"] == others.state_dict()["round"] == 2
    assert torch.equal(weights(again), weights(other)), "the merged weights, and nothing on top of them"
    assert its.state_dict()["phase"] == 0
    others.close()
    its.close()
    shutil.rmtree(folder / "versions")
    damage_newest(folder)
    with (
        coordinator.serving(),
        pytest.raises(ValueError, match="merges with other sites cannot be made again"),
    ):
        run_trainer(config, replace(site, coordinator_url=coordinator.url), stop=threading.Event())
    shutil.rmtree(folder / "checkpoints")
    with coordinator.serving(), pytest.raises(ValueError, match="version 2 is published, but no checkpoint"):
        run_trainer(config, replace(site, coordinator_url=coordinator.url), stop=threading.Event())


def damage_newest(folder: Path) -> None:
    (max((folder / "checkpoints").glob("v*")) / "weights.safetensors").write_bytes(b"half a file")


def test_torchft_needs_its_lighthouse() -> None:
    pytest.importorskip("torchft")
    with pytest.raises(ValueError, match="lighthouse"):
        make_averager(
            DilocoConfig(engine="torchft"), PeerAddress(), "run", log=Log("test"), stop=threading.Event()
        )


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_a_site_of_two_ranks_merges_like_one_of_a_single_rank(tmp_path: Path) -> None:
    """Weights are sharded over the ranks (FSDP2), rank 0 merges; the other site has one rank."""
    model = make_model(tmp_path / "model")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = subprocess.Popen(
        [sys.executable, *command, str(HERE / "site_ranks_worker.py"), str(model), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": f"{HERE.parents[1] / 'src'}:{HERE}", "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    hub = LocalHub()
    (one, its), (other, others) = make_site(hub, model), make_site(hub, model)
    its.join()
    others.join()
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(train, learner, seed=seed, steps=4) for seed, learner in enumerate((one, other))]
        seen, _ = (job.result(120) for job in jobs)
    its.close()
    others.close()
    _, log = process.communicate(timeout=300)
    assert process.returncode == 0, log
    found = torch.load(tmp_path / "sharded.pt", weights_only=True)
    sharded = torch.cat([found[name].flatten() for name, _ in one.decoder.named_parameters()])
    assert torch.allclose(sharded, seen[-1], atol=1e-4)
