"""A model's parameters as flat float32 vectors in main memory, one per fragment.

Under FSDP2 a parameter is a DTensor, and only this rank's shard is read: it is averaged with the equal shards of other sites.
"""

import re
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from shoal.diloco.outer import Vector

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


class Fragment:
    """A subset of the parameters, in a fixed order."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.num_values = sum(self._size(parameter) for parameter in self.parameters)

    @torch.no_grad()
    def read(self) -> Vector:
        """Returns the present values."""
        values_N = np.empty(self.num_values, np.float32)
        for parameter, part in self._parts(values_N):
            part.copy_(self._value(parameter).reshape(-1))
        return values_N

    @torch.no_grad()
    def write(self, values_N: Vector) -> None:
        """Copies values into the parameters."""
        for parameter, part in self._parts(values_N):
            self._set_value(parameter, part)

    def as_stored(self, values_N: Vector) -> Vector:
        """Returns the values rounded to the parameters' dtypes, as `write` followed by `read` would return them."""
        if all(parameter.dtype == torch.float32 for parameter in self.parameters):
            return values_N
        held_N = values_N.copy()
        for parameter, part in self._parts(held_N):
            part.copy_(part.to(parameter.dtype))
        return held_N

    def _parts(self, values_N: Vector) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yields every parameter with its part of `values_N`, flat, sharing its memory."""
        values, at = torch.from_numpy(values_N), 0
        for parameter in self.parameters:
            size = self._size(parameter)
            yield parameter, values[at : at + size]
            at += size

    def _size(self, parameter: nn.Parameter) -> int:
        """Returns how many values of a parameter the fragment has."""
        return local(parameter).numel()

    def _value(self, parameter: nn.Parameter) -> Tensor:
        return local(parameter)

    def _set_value(self, parameter: nn.Parameter, value: Tensor) -> None:
        held = local(parameter)
        held.copy_(value.view(held.shape))


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
