"""Measures the host memory that publication and checkpoints need beside training, in bytes per parameter.

    python bench/host_memory.py                     random Llamas of 46M and 95M parameters; minutes and 4 GB
    python bench/host_memory.py --states int8       one-byte moments
    python bench/host_memory.py --lr 3e-4           a rate at which every published word changes

On a CPU weights, gradients, moments and activations are host memory too. So a plain step's peak is measured first; what later phases
need above it is what a trainer with a GPU needs on its host. The peak of each phase is Linux's VmHWM, reset before it. "Beside the
optimiser" is without the copy of the moments that a checkpoint takes.

Each model is measured in a process of its own. The last column has the bytes of each further parameter of the larger model; the rest
does not grow with the model: buffers of one range or one tensor.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from step import WAIT_S, Bench, Published

from trainer import llama

LAYERS = (3, 10)
PHASES = (
    "a plain step",
    "first version, whole",
    "a step beside a publication",
    "a step beside publication and checkpoint",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--states", choices=("float32", "int8"), default="float32")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--layers", type=int, help="only measure this one model, and print JSON")
    options = parser.parse_args(namespace=argparse.Namespace(
        device="cpu", tokens=64, micro_tokens=0, recompute=False, snapshot_every=8
    ))  # fmt: skip
    if options.layers is None:
        print_table([in_child(layers, options) for layers in LAYERS])
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        shape = llama(32000, 768, options.layers, 12, 12, 2048)
        print(json.dumps(measure(Bench(shape, options, Path(folder)))))


def in_child(layers: int, options: argparse.Namespace) -> dict[str, float]:
    """Returns the measurements of one model."""
    arguments = ["--layers", str(layers), "--states", options.states, "--lr", str(options.lr)]
    # Otherwise the C library keeps freed blocks below 32 MiB, which the tensors of these small models are.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    child = subprocess.run(
        [sys.executable, __file__, *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    print(f"{found['parameters'] / 1e6:.1f}M parameters measured", flush=True)
    return found


def print_table(models: list[dict[str, float]]) -> None:
    small, large = models
    sizes = " | ".join(
        f"{one['parameters'] / 1e6:.1f}M: peak MB | beside the optimiser, bytes per parameter"
        for one in models
    )
    print(f"| phase | {sizes} | of each further parameter |")
    print("|---|---|---|---|---|---|")
    for phase in PHASES:
        copied = "checkpoint" in phase
        above = [one[phase] - one[PHASES[0]] - copied * one["optimiser"] for one in models]
        each = [f"{one[phase] / 1e6:.0f} | {rest / one['parameters']:.2f}" for one, rest in zip(models, above, strict=True)]  # fmt: skip
        growth = (above[1] - above[0]) / (large["parameters"] - small["parameters"])
        print(f"| {phase} | {' | '.join(each)} | {growth:.2f} |")


def measure(bench: Bench) -> dict[str, float]:
    """Returns the peak of each phase, the optimiser's bytes and the number of parameters."""
    parameters = sum(one.numel() for one in bench.learner.decoder.parameters())
    bench.step()  # makes the moments
    actions: tuple[Callable[[], object], ...] = (
        bench.step,
        bench.begin_whole,
        lambda: step_and_publish(bench),
        lambda: step_and_publish(bench, checkpoint=True),
    )
    found: dict[str, float] = {phase: peak_of(action) for phase, action in zip(PHASES, actions, strict=True)}
    optimiser = sum(
        value.nbytes for state in bench.learner.optimizer.state.values() for value in state.values()
    )
    bench.publisher.close()
    bench.checkpoints.close(WAIT_S)
    return found | {"parameters": parameters, "optimiser": optimiser}


def step_and_publish(bench: Bench, *, checkpoint: bool = False) -> None:
    """Publishes the current version, and writes its checkpoint if asked to, while the next step trains."""
    if checkpoint:
        version = bench.learner.version
        take = bench.lockstep.later_snapshot(bench.checkpoints.shard_folder(version))
        bench.checkpoints.begin(version, take, None)
    bench.step()
    bench.publish(Published())
    bench.publication.finish(WAIT_S)
    bench.checkpoints.finish(WAIT_S)


def peak_of(action: Callable[[], object]) -> int:
    """Returns the largest resident memory of this process during an action, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    action()
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux writes VmHWM"
    return 1024 * int(found[1])


if __name__ == "__main__":
    main()
