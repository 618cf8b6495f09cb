"""A learner's state at one version, in host memory: what a checkpoint is written from and a publication made of.

Taken and given back by all ranks together, tensor by tensor, so that no device ever holds more than its own part and
one whole tensor; the host of rank 0 holds all of it. How many ranks there were does not show in it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.trainer.optim.learner import Learner

_OF_THE_MACHINE = {"params", "fused", "foreach", "capturable"}
"""Of an optimiser's settings: how it computes here, not what. A run may go on on another kind of device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Complete on rank 0; on others an empty shell."""

    version: int
    weights: dict[str, Tensor]
    """What is trained, by name, float32."""
    optimizer: dict[str, Any]
    """As torch's own state_dict, with whole tensors."""
    random: dict[str, Tensor]
    outer: dict[str, Any] | None = None
    """What is shared with other sites, where there are any (sites.Sites)."""


def take(learner: Learner) -> Capture:
    """Copy everything a later process needs. All ranks must call it."""
    whole = learner.ranks.whole
    weights = {name: whole(parameter) for name, parameter in trained(learner).items()}
    kept = learner.optimizer.state_dict()
    kept["state"] = {
        index: {name: whole(value) for name, value in state.items()} for index, state in kept["state"].items()
    }
    random = {"cpu": torch.get_rng_state()}
    if learner.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(learner.device)
    outer = None if learner.sites is None else learner.sites.state()
    return Capture(version=learner.version, weights=weights, optimizer=kept, random=random, outer=outer)


def put(learner: Learner, capture: Capture | None) -> None:
    """Make the learner what it was. Rank 0 has the capture, the others give None; all must call it."""
    spread, ranks = learner.ranks.spread, learner.ranks
    for name, parameter in trained(learner).items():
        spread(None if capture is None else capture.weights[name], parameter)
    told = ranks.share_words(None if capture is None else _without_tensors(capture))
    groups = learner.optimizer.param_groups
    parameters = [(one, group["fused"]) for group in groups for one in group["params"]]
    learner.optimizer.state.clear()
    for index, step in told["steps"].items():
        parameter, fused = parameters[index]
        state = learner.optimizer.state[parameter]
        state["step"] = step.to(learner.device if fused else "cpu")  # a fused optimiser counts on the device
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter)
            spread(None if capture is None else capture.optimizer["state"][index][name], state[name])
    for group, stored in zip(groups, told["groups"], strict=True):
        group.update({key: value for key, value in stored.items() if key not in _OF_THE_MACHINE})
    torch.set_rng_state(told["random"]["cpu"])
    if learner.device.type == "cuda" and "cuda" in told["random"]:
        torch.cuda.set_rng_state(told["random"]["cuda"], learner.device)
    learner.version = told["version"]
    if learner.sites is not None and capture is not None and capture.outer is not None:
        learner.sites.load(capture.outer)


def trained(learner: Learner) -> dict[str, Tensor]:
    return {name: one for name, one in learner.decoder.named_parameters() if one.requires_grad}


def _without_tensors(capture: Capture) -> dict[str, Any]:
    """What of it is small enough to be told in words."""
    return {
        "version": capture.version,
        "steps": {index: state["step"] for index, state in capture.optimizer["state"].items()},
        "groups": capture.optimizer["param_groups"],
        "random": capture.random,
    }
