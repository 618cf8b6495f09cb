"""Runs one rank of one site: FSDP2 inside the site, Hivemind between equal shards of two sites.

python fsdp_rank.py '{"rank": 0, "site": 0, "store": "/path", "join": [...], "steps": 6}'
"""

import json
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from shoal.diloco import AveragerSettings, DiLoCo, PeerAverager, Schedule
from shoal.diloco.transport.hivemind_mesh import HivemindMesh, PeerAddress
from shoal.telemetry import Log


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def batch(site: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * site + step)
    return torch.randn(4, 6, generator=generator), torch.randint(0, 4, (4,), generator=generator)


def main() -> None:
    task = json.loads(sys.argv[1])
    rank, site = task["rank"], task["site"]
    dist.init_process_group("gloo", init_method=f"file://{task['store']}", rank=rank, world_size=2)
    model = make_model()
    site_mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=site_mesh)
    mesh = HivemindMesh(f"fsdp/shard-{rank}-of-2", PeerAddress(join=tuple(task["join"]), host="127.0.0.1"))
    averager = PeerAverager(
        mesh, log=Log("rank"), codec="fp32", settings=AveragerSettings(min_peers=2, announce_s=1.0)
    )
    optimizer = DiLoCo(
        model,
        inner=torch.optim.AdamW(model.parameters(), lr=1e-2),
        averager=averager,
        schedule=Schedule(inner_steps=3, deadline_s=90),
        site=dist.group.WORLD,
    )
    optimizer.join(deadline_s=60)
    sys.stdout.write(json.dumps({"addresses": mesh.addresses}) + "\n")
    sys.stdout.flush()
    while not averager.peers():
        time.sleep(0.1)
    for step in range(task["steps"]):
        # Both ranks compute on the whole batch, so the mean of their gradients is the batch's gradient.
        x, y = batch(site, step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    sharded = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    full = torch.cat([parameter.full_tensor().flatten() for parameter in sharded]).tolist()
    state = optimizer.outer_state
    sys.stdout.write(json.dumps({"weights": full, "round": state.round, "work": state.work}) + "\n")
    sys.stdout.flush()
    dist.barrier()
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
