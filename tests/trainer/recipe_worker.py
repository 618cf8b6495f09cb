"""Run by torchrun in test_recipe_on_ranks.py: a few steps with everything a recipe can ask for; rank 0 keeps the results."""

import json
import os
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import torch
from tiny_learner import make_batch

from shoal.telemetry import Log
from shoal.trainer.config import TrainerConfig
from shoal.trainer.distributed.lockstep import Crew
from shoal.trainer.distributed.ranks import join_ranks

NUM_STEPS = 3


def main(model: str, out: str) -> None:
    torch.set_num_threads(1)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    ranks = join_ranks(rank=int(os.environ.get("RANK", "0")), size=size, device="cpu", speech_s=60)
    for name, keys in json.loads((Path(out) / "configs.json").read_text()).items():
        config = TrainerConfig.model_validate_json(json.dumps(keys))
        crew = Crew(config, ranks, device="cpu", log=Log("trainer"), stop=threading.Event())
        if not ranks.leads:
            crew.follow()
            continue
        crew.begin(Path(model), 0.8, 12)
        crew.keep_reference(Path(out) / f"{name}-{size}.safetensors", crew.capture())
        figures = [asdict(crew.step(make_batch(version))) for version in range(NUM_STEPS)]
        torch.save({"figures": figures, "weights": crew.capture().weights}, Path(out) / f"{name}-{size}.pt")
        crew.end("finished")
    ranks.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
