"""Loads a checkpoint into a learner: weights, moments, random state and the state that is shared with other sites.

Both layouts (checkpoint.py) can be loaded by any number of ranks, and moments may be kept in another number format than the one
they were stored in. Names, shapes and the optimizer's layout are compared before the first value is written, so that a checkpoint
of another model leaves the learner as it was.
"""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded

from shoal.diloco.ranks import Ranks, explain_lost_rank
from shoal.trainer.io.checkpoint import MOMENTS, OPTIMIZER, SHARDS, WEIGHTS, Checkpoint
from shoal.trainer.optim.compact_adamw import BLOCK, CompactAdamW, decode_moment
from shoal.trainer.optim.learner import Learner

_DEVICE_SETTINGS = {"params", "fused", "foreach", "capturable"}
"""Optimizer settings that say how this device computes. They are not restored: a run may continue on another device."""


def load_checkpoint(learner: Learner, checkpoint: Checkpoint) -> None:
    """Sets the learner to the state in a checkpoint. All ranks must call it, and all read the folder.

    Raises ValueError if the checkpoint belongs to another model; the learner is then unchanged.
    """
    stored = torch.load(checkpoint.folder / OPTIMIZER, map_location="cpu", weights_only=True)
    optimizer, parameters = stored["optimizer"], learner.trained_parameters()
    # Checked before the first value is written: a checkpoint of another model must leave the learner as it was.
    _check_shapes(checkpoint.folder, _stored_shapes(checkpoint), parameters)
    _check_layout(checkpoint.folder, optimizer, learner)
    states = {name: optimizer["state"].get(index, {}) for index, name in enumerate(learner.optimizer_names())}
    learner.optimizer.state.clear()
    # One kind after another: all three at once would take the memory of a second learner.
    for kind in ("weights", *MOMENTS):
        tensors = {name: torch.zeros_like(one, requires_grad=False) for name, one in parameters.items()}
        if checkpoint.format == "shoal/checkpoint/1":
            _read_whole(learner.ranks, checkpoint.folder, kind, states, tensors)
        else:
            _read_shards(learner.ranks, checkpoint.folder / SHARDS, kind, tensors)
        with torch.no_grad():
            for name, tensor in tensors.items():
                _restore_tensor(learner.optimizer, parameters[name], kind, states[name], tensor)
    for group, settings in zip(learner.optimizer.param_groups, optimizer["param_groups"], strict=True):
        group.update({key: value for key, value in settings.items() if key not in _DEVICE_SETTINGS})
    torch.set_rng_state(stored["rng"])
    if learner.device.type == "cuda" and "cuda_rng" in stored:
        torch.cuda.set_rng_state(stored["cuda_rng"], learner.device)
    learner.version = checkpoint.state.version
    if learner.sites is not None and "outer" in stored:
        learner.sites.load_state_dict(stored["outer"])


def _restore_tensor(
    optimizer: torch.optim.Optimizer, parameter: Tensor, kind: str, stored: dict[str, Tensor], value: Tensor
) -> None:
    """Writes a parameter, or one of its moments; a parameter that was never updated has none."""
    if kind == "weights":
        parameter.copy_(value)
    elif stored:
        if isinstance(optimizer, CompactAdamW):
            optimizer.set_moment(parameter, kind, value)
            step = stored["step"].clone()
        else:
            optimizer.state[parameter][kind] = value
            # A fused optimizer counts its steps on the device.
            fused = any(group.get("fused") for group in optimizer.param_groups)
            step = stored["step"].to(parameter.device if fused else "cpu", copy=True)
        optimizer.state[parameter]["step"] = step


def _read_whole(
    ranks: Ranks, folder: Path, kind: str, states: dict[str, dict[str, Tensor]], tensors: dict[str, Tensor]
) -> None:
    """Fills `tensors` from the whole tensors that a single process wrote."""
    with safe_open(folder / WEIGHTS, framework="pt", device="cpu") as file:
        for name, into in tensors.items():
            if kind == "weights":
                ranks.scatter(file.get_tensor(name), into)
            elif "mean_codes" in states[name]:
                ranks.scatter(decode_moment(states[name], kind, into.shape), into)
            elif states[name]:
                ranks.scatter(states[name][kind], into)


def _read_shards(ranks: Ranks, folder: Path, kind: str, tensors: dict[str, Tensor]) -> None:
    """Fills `tensors` from shards, however many ranks wrote them."""
    named = {f"{kind}.{name}": tensor for name, tensor in tensors.items()}
    with explain_lost_rank("loading a checkpoint"), warnings.catch_warnings():
        # torch warns that a single process loads alone, which is meant here.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load_sharded(named, checkpoint_id=folder, process_group=ranks.checkpoints, no_dist=ranks.size == 1)


def _stored_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every weight in a checkpoint."""
    if checkpoint.format == "shoal/checkpoint/1":
        with safe_open(checkpoint.folder / WEIGHTS, framework="pt", device="cpu") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    stored = FileSystemReader(checkpoint.folder / SHARDS).read_metadata().state_dict_metadata
    prefix = "weights."
    return {
        name.removeprefix(prefix): tuple(getattr(value, "size", ()))
        for name, value in stored.items()
        if name.startswith(prefix)
    }


def _check_shapes(folder: Path, stored: dict[str, tuple[int, ...]], own: Mapping[str, Tensor]) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in own.items()}
    if stored != wanted:
        name = min(one for one in stored.keys() | wanted.keys() if stored.get(one) != wanted.get(one))
        raise ValueError(
            f"{folder} holds another model than the run file names: {len(stored)} weights, the run has {len(wanted)}; {name} is "
            f"{stored.get(name, 'missing')} there and {wanted.get(name, 'missing')} here; "
            "give the run another folder, or name the model (and lora_rank) it was started with"
        )


def _check_layout(folder: Path, stored: dict[str, Any], learner: Learner) -> None:
    """Raises ValueError if the optimizer's state was written for other parameters than the learner's."""
    names, parameters = learner.optimizer_names(), learner.trained_parameters()
    sizes = [len(group["params"]) for group in stored["param_groups"]]
    own = [len(group["params"]) for group in learner.optimizer.param_groups]
    problem = f"parameter groups of {sizes}, this run has {own}" if sizes != own else ""
    for index, state in stored["state"].items():
        shape = tuple(parameters[names[index]].shape) if index < len(names) else ()
        moments = [tuple(state[one].shape) for one in MOMENTS if one in state]
        if "mean_codes" in state:  # blocks of the flat values
            same = state["mean_codes"].shape[0] == -(-math.prod(shape) // BLOCK)
        else:
            same = all(one == shape for one in moments)
        if index >= len(names) or not same or "step" not in state:
            problem = problem or f"moments of {moments} for parameter {index} of shape {shape}"
    if problem:
        raise ValueError(
            f"{folder} holds an optimizer state of another layout: {problem}; continue with the model and release that wrote it, "
            "or start a new run in another folder"
        )
