"""Tests FSDP2 inside two sites of two ranks: equal shards average with each other, with the result of no sharding."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from local_swarm import in_threads, make_peer
from torch.nn import functional as F

pytest.importorskip("hivemind", reason="the extra `hivemind` is not installed: make hivemind")
pytestmark = [pytest.mark.hivemind, pytest.mark.timeout(300)]

from fsdp_rank import batch, make_model  # noqa: E402

from shoal.diloco import DiLoCo, LocalHub, Schedule  # noqa: E402

RANK = Path(__file__).parent / "fsdp_rank.py"
STEPS = 6


def start(folder: Path, *, rank: int, site: int, join: list[str]) -> "subprocess.Popen[str]":
    task = {"rank": rank, "site": site, "store": str(folder / f"store-{site}"), "join": join, "steps": STEPS}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / f"rank-{site}-{rank}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, str(RANK), json.dumps(task)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )


def unsharded() -> list[float]:
    hub = LocalHub()
    models = [make_model() for _ in range(2)]
    optimizers = [
        DiLoCo(
            model,
            inner=torch.optim.AdamW(model.parameters(), lr=1e-2),
            averager=make_peer(hub, min_peers=2),
            schedule=Schedule(inner_steps=3, deadline_s=30),
        )
        for model in models
    ]
    for optimizer in optimizers:
        optimizer.join(deadline_s=10)

    def train(site: int) -> None:
        for step in range(STEPS):
            x, y = batch(site, step)
            F.cross_entropy(models[site](x), y).backward()
            optimizers[site].step()
            optimizers[site].zero_grad()

    in_threads([functools.partial(train, site) for site in range(2)])
    in_threads([optimizer.close for optimizer in optimizers])
    return torch.cat([p.detach().flatten() for p in models[0].parameters()]).tolist()


def test_sharded_sites_train_like_an_unsharded_model(tmp_path: Path) -> None:
    ranks = [start(tmp_path, rank=rank, site=0, join=[]) for rank in range(2)]
    try:
        addresses = [json.loads(read(process))["addresses"] for process in ranks]
        ranks += [start(tmp_path, rank=rank, site=1, join=addresses[rank]) for rank in range(2)]
        for process in ranks[2:]:
            read(process)
        ended: list[dict[str, Any]] = [json.loads(read(process)) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait(30)
            assert process.stdout is not None
            process.stdout.close()
    assert [end["round"] for end in ended] == [2] * 4
    assert all(end["weights"] == ended[0]["weights"] for end in ended)
    assert torch.allclose(torch.tensor(ended[0]["weights"]), torch.tensor(unsharded()), atol=1e-5)


def read(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "a rank died; see its log in the test's folder"
    return line
