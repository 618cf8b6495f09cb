"""The reference policy of the KL term: the weights of version 0, kept in host memory.

They need no second model on the device. To score, they change places with the learner's for as long as it takes; the
swap is exact. Of several ranks, each keeps its own part. On disk they are one safetensors file, so that a resumed run has
the same reference.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.model.weights import disk_errors

Weights = dict[str, Tensor]


def kept_weights(path: Path, weights: Weights, version: int) -> Weights:
    """The weights in the file at `path`; at version 0, where there is none yet, `weights`, which are written there."""
    if path.exists():
        return load_file(path)
    if version != 0:
        raise ValueError(
            f"no {path}: the KL term needs the weights of version 0, and this trainer is at version {version}; "
            "set kl = 0, or start a new run"
        )
    partial = path.with_name(f".{path.name}.partial")
    with disk_errors(path):
        save_file(weights, partial)
    os.replace(partial, path)
    return weights


class Reference:
    """What of a model's trained weights this process holds, as it was at some time."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = {name: part.to("cpu", copy=True) for name, part in _parts(model).items()}

    @contextmanager
    def in_place_of(self, model: nn.Module, reread: Callable[[], None]) -> Iterator[None]:
        """Inside, `model` has these weights; afterwards, whatever happens, its own.

        `reread` lets go of what a device has gathered of the weights: it would hide the ranks' parts, and outlive them.
        """
        reread()
        own = Reference(model)
        try:
            self.copy_to(model)
            yield
        finally:
            reread()
            own.copy_to(model)

    def copy_to(self, model: nn.Module) -> None:
        with torch.no_grad():
            for name, part in _parts(model).items():
                part.copy_(self._weights[name])


def _parts(model: nn.Module) -> Weights:
    with torch.no_grad():
        return {
            name: parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
