"""Started by torchrun in test_recipe_on_ranks.py: a few steps with every part of the recipe; rank 0 saves the results."""

import json
import os
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import torch
from tiny_learner import make_batch

from shoal.diloco.ranks import Ranks, join_ranks
from shoal.telemetry import Log
from shoal.trainer.config import TrainerConfig
from shoal.trainer.distributed.lockstep import Lockstep

NUM_STEPS = 3


def main(model: str, out: str) -> Ranks:
    torch.set_num_threads(1)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    ranks = join_ranks(rank=int(os.environ.get("RANK", "0")), size=size, device="cpu", command_timeout_s=60)
    for name, keys in json.loads((Path(out) / "configs.json").read_text()).items():
        config = TrainerConfig.model_validate_json(json.dumps(keys))
        lockstep = Lockstep(config, ranks, device="cpu", log=Log("trainer"), stop=threading.Event())
        if not ranks.leads:
            lockstep.follow()
            continue
        lockstep.create_learner(Path(model), 12)
        lockstep.set_reference(Path(out) / f"{name}-{size}.safetensors")
        figures = [
            asdict(lockstep.step(make_batch(version, temperatures=(0.8, 1.1))))
            for version in range(NUM_STEPS)
        ]
        torch.save(
            {"figures": figures, "weights": lockstep.snapshot().weights}, Path(out) / f"{name}-{size}.pt"
        )
        lockstep.end("finished")
    return ranks


if __name__ == "__main__":
    ranks = main(*sys.argv[1:])
    ranks.leave()
    ranks.release()
