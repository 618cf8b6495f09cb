"""Compares the sharded path on a mesh of one rank with the plain path: losses, gradients, weights, peak memory and its estimate.

    python bench/sharded.py --shape toy --layers 2 --tokens 256 --updates 4          a quick test on any machine
    python bench/sharded.py --device cuda --layers 6 --tokens 32768 --updates 8      QwQ-32B's width on one H200, random weights

Both paths train one batch in `--updates` updates, each of one row of `--tokens` packed tokens, by the recipe of the INTELLECT-2 report's run
file: bfloat16, recomputed layers, recomputed behaviour log-probs, KL to version 0, AdamW with float32 moments. They begin with the same
weights. The sharded path is FSDP2 on a process group of one rank (NCCL on a GPU, gloo on a CPU), as `torchrun --nproc-per-node 1`
does not use it: a single process has a bfloat16 copy instead.

Prints loss, gradient norm, seconds and peak memory of each path, then the differences. The command fails if they are more than rounding
(--tolerance, for the loss and the first gradient), or if a peak is further than 15 % from `shoal run --dry-run`'s estimate. `max_gap` of the
weights is in units of the learning rate: AdamW moves a weight whose gradient is near zero by the learning rate in either direction. So weights
drift apart after the first update, and norms of later gradients have DRIFT times the tolerance.
"""

import argparse
import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from step import attempt
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shoal.cli.run.estimate import device_bytes
from shoal.cli.run.runfile import RunFile, load_run_file
from shoal.diloco.ranks import SINGLE_PROCESS, Ranks
from shoal.model.load_model import empty_decoder
from shoal.model.shape import Shape
from shoal.trainer.data.batch import TrainBatch
from shoal.trainer.optim.learner import Learner
from shoal.trainer.optim.reference import Reference
from trainer import SHAPES, draw, make_batch

RUN_FILE = Path(__file__).parent.parent / "runs" / "intellect-2.toml"
MOST_OFF = 0.15
DRIFT = 5.0


@contextmanager
def one_rank(device: str) -> Iterator[Ranks]:
    """Joins a process group of one rank."""
    kind = torch.device(device).type
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield Ranks(mesh=init_device_mesh(kind, (1,)))
    finally:
        dist.destroy_process_group()


def run_file(options: argparse.Namespace, row_tokens: int) -> RunFile:
    """Returns the report's recipe with this number of updates, and rows of this length."""
    file = load_run_file(RUN_FILE)
    changed = {
        "row_tokens": row_tokens,
        "rows_per_micro_batch": 1,
        "optimizer_steps": options.updates,
        "warmup_steps": 0,
        "learning_rate": options.lr,
        "activation_checkpointing": True,
    }
    return file.model_copy(update={"trainer": file.trainer.model_copy(update=changed)})


def batch_of(shape: Shape, options: argparse.Namespace) -> tuple[TrainBatch, int]:
    """Returns a batch with a group of one row's samples for each update, and the tokens of a row."""
    one = make_batch(shape, "packed", options.tokens)
    row_tokens = sum(len(sample.tokens) - 1 for sample in one.samples)
    samples = [replace(sample, group=group) for group in range(options.updates) for sample in one.samples]
    return TrainBatch(version=0, samples=tuple(samples), num_groups=options.updates), row_tokens


class Measured(NamedTuple):
    """What one path gave."""

    figures: dict[str, Any]
    gradients: dict[str, Tensor]
    """Of the first update, clipped; one value in many of each tensor, as of the weights."""
    weights: dict[str, Tensor]


def measure(shape: Shape, options: argparse.Namespace, ranks: Ranks) -> Measured:
    """Trains the batch; returns the figures of all updates, and values of gradients and weights."""
    cuda, began_s = torch.device(options.device).type == "cuda", time.perf_counter()
    sharded = ranks.mesh is not None
    batch, row_tokens = batch_of(shape, options)
    file = run_file(options, row_tokens)
    decoder = empty_decoder(shape, torch.float32, options.device)
    torch.manual_seed(0)
    draw(decoder)
    learner = Learner(decoder, file.trainer, max_new_tokens=options.tokens, ranks=ranks)
    learner.reference = Reference(decoder)
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    norms: list[float] = []
    gradients: dict[str, Tensor] = {}
    update = learner._update

    def watched(*arguments: Any) -> float:
        norms.append(update(*arguments))
        if len(norms) == 1:
            gradients.update(some_of(decoder, options.every, lambda one: one.grad))
        print(json.dumps({"sharded": sharded, "update": len(norms), "grad_norm": norms[-1]}), flush=True)
        return norms[-1]

    learner._update = watched  # type: ignore[method-assign, assignment]
    ready_s = time.perf_counter()
    figures = learner.step(batch, threading.Event())
    found = {
        "sharded": sharded,
        "loss": figures.loss,
        "kl": figures.kl,
        "logprob_gap": figures.logprob_gap,
        "grad_norms": norms,
        "setup_s": round(ready_s - began_s, 1),
        "step_s": round(time.perf_counter() - ready_s, 2),
    }
    if cuda:
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        found["estimate_gb"] = device_bytes(shape, file, sharded=sharded) / 1e9
    print(json.dumps(found), flush=True)
    return Measured(found, gradients, some_of(decoder, options.every, lambda one: one))


def some_of(model: torch.nn.Module, every: int, of: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
    """Returns one value in `every` of each parameter's tensor, in host memory."""
    found = {}
    for name, parameter in model.named_parameters():
        tensor = of(parameter)
        assert tensor is not None, f"{name} has no gradient"
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found[name] = local.detach().flatten()[::every].cpu()
    return found


def compare(plain: Measured, sharded: Measured, options: argparse.Namespace) -> bool:
    """Prints how far the two paths are from each other, and returns whether that is within the limits."""
    before, after = plain.figures, sharded.figures
    norm_gaps = [abs(a - b) / a for a, b in zip(before["grad_norms"], after["grad_norms"], strict=True)]
    loss_gap = abs(before["loss"] - after["loss"])
    of_plain, of_sharded = (torch.cat(list(one.gradients.values())).double() for one in (plain, sharded))
    gradient_gap = float((of_plain - of_sharded).norm() / of_plain.norm())
    pairs = [(plain.weights[name], sharded.weights[name]) for name in plain.weights]
    found = {
        "loss_gap": loss_gap,
        "grad_norm_relative_gaps": norm_gaps,
        "gradient_relative_gap": gradient_gap,
        "kl_gap": abs(before["kl"] - after["kl"]),
        "weights_equal_share": sum(int((a == b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs),
        "weights_max_gap_in_rates": max(float((a - b).abs().max()) for a, b in pairs) / options.lr,
        "peak_against_estimate": [one["peak_gb"] / one["estimate_gb"] for one in (before, after) if "peak_gb" in one],
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    first = max(loss_gap, gradient_gap, norm_gaps[0]) <= options.tolerance
    return (
        first
        and max(norm_gaps) <= DRIFT * options.tolerance
        and all(abs(one - 1) <= MOST_OFF for one in found["peak_against_estimate"])
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="32B", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=32768, help="of a row, one row for each update")
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument(
        "--every", type=int, default=64, help="compare one weight in this many of each tensor"
    )
    parser.add_argument("--tolerance", type=float, default=0.01)
    options = parser.parse_args()
    shape = replace(SHAPES[options.shape], num_layers=options.layers)
    plain = attempt("plain", lambda: measure(shape, options, SINGLE_PROCESS))
    gc.collect()  # the learner is part of a cycle
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

    def on_a_mesh() -> Measured:
        with one_rank(options.device) as ranks:
            found = measure(shape, options, ranks)
            gc.collect()
        return found

    sharded = attempt("sharded", on_a_mesh)
    if plain is None or sharded is None:
        return 1
    return int(not compare(plain, sharded, options))


if __name__ == "__main__":
    sys.exit(main())
