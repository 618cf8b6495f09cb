"""The reference policy of the KL term: the weights of version 0, kept in host memory.

They need no second model on the device. To score, they change places with the learner's for as long as it takes; the
swap is exact. On disk they are one safetensors file, so that a resumed run has the same reference.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


class Reference:
    """Version 0's weights by parameter name."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights = weights

    @classmethod
    def of(cls, policy: nn.Module) -> "Reference":
        return cls(
            {name: parameter.detach().to("cpu", copy=True) for name, parameter in policy.named_parameters()}
        )

    @classmethod
    def keep(cls, path: Path, policy: nn.Module, version: int) -> "Reference":
        """The one in the file at `path`; at version 0, where there is none yet, the policy's own weights, written there."""
        if path.exists():
            return cls(load_file(path))
        if version != 0:
            raise ValueError(
                f"no {path}: the KL term needs the weights of version 0, and this trainer is at version {version}; "
                "set kl = 0, or start a new run"
            )
        reference = cls.of(policy)
        partial = path.with_name(f".{path.name}.partial")
        save_file(reference._weights, partial)
        os.replace(partial, path)
        return reference

    @contextmanager
    def in_place_of(self, policy: nn.Module) -> Iterator[None]:
        """Inside, `policy` computes with these weights; afterwards, whatever happens, with its own."""
        own = {name: parameter.detach().to("cpu", copy=True) for name, parameter in policy.named_parameters()}
        try:
            _copy(self._weights, policy)
            yield
        finally:
            _copy(own, policy)


def _copy(weights: dict[str, Tensor], policy: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.copy_(weights[name])
