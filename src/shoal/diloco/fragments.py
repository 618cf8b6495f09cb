"""A model's parameters as flat float32 vectors in main memory, one per fragment.

Under FSDP2 a parameter is a DTensor, and only this rank's shard is read: it is averaged with the equal shards of other sites.
"""

import re
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from shoal.diloco.outer import Vector

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


class Fragment:
    """A subset of the parameters, in a fixed order."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self.num_values = sum(local(parameter).numel() for parameter in self._parameters)

    @torch.no_grad()
    def read(self) -> Vector:
        """Returns the present values."""
        values_N = np.empty(self.num_values, np.float32)
        into = torch.from_numpy(values_N)
        at = 0
        for parameter in self._parameters:
            part = local(parameter)
            into[at : at + part.numel()].copy_(part.reshape(-1))
            at += part.numel()
        return values_N

    @torch.no_grad()
    def write(self, values_N: Vector) -> None:
        """Copies values into the parameters."""
        at = 0
        for parameter in self._parameters:
            part = local(parameter)
            part.copy_(torch.from_numpy(values_N[at : at + part.numel()]).view(part.shape))
            at += part.numel()

    def as_stored(self, values_N: Vector) -> Vector:
        """Returns the values rounded to the parameters' dtypes, as `write` followed by `read` would return them."""
        if all(parameter.dtype == torch.float32 for parameter in self._parameters):
            return values_N
        held_N = np.empty_like(values_N)
        at = 0
        for parameter in self._parameters:
            end = at + self._size(parameter)
            held_N[at:end] = torch.from_numpy(values_N[at:end]).to(parameter.dtype).float().numpy()
            at = end
        return held_N

    def _size(self, parameter: nn.Parameter) -> int:
        """Returns how many values of a parameter the fragment has."""
        return local(parameter).numel()


def fragments_of(model: nn.Module, num_fragments: int) -> list[Fragment]:
    """Divides the trained parameters: fragment k gets the layers k, k + K, ...; parameters outside layers go last.

    Strided rather than contiguous: the Streaming DiLoCo paper found it better, and every fragment spans the whole depth.
    """
    groups: list[list[nn.Parameter]] = [[] for _ in range(num_fragments)]
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        layer = _LAYER.search(name)
        groups[int(layer[1]) % num_fragments if layer else -1].append(parameter)
    if any(not group for group in groups):
        raise ValueError(f"fragments = {num_fragments} is more than the model has layers; lower it")
    return [Fragment(group) for group in groups]


def local(parameter: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, or the tensor itself."""
    to_local = getattr(parameter, "to_local", None)
    return parameter.detach() if to_local is None else to_local().detach()
