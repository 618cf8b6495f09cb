"""The reference policy of the KL term: the weights of version 0, kept in host memory.

They need no second model on the device: while the reference scores a batch, its weights are swapped with the learner's;
the swap is exact. With several ranks each keeps its own shards. On disk they are one safetensors file, so that a resumed
run has the same reference.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from shoal.diloco.fragments import local
from shoal.files import restore_disk_error, write_atomically
from shoal.trainer.memory import pin_memory, unpin_memory

Weights = dict[str, Tensor]


def save_reference(path: Path, weights: Weights, version: int) -> None:
    """Writes version 0's weights to `path`. Raises ValueError if the trainer is at a later version."""
    if version != 0:
        raise ValueError(
            f"no {path}: the KL term needs the weights of version 0, and this trainer is at version {version}; "
            "set kl = 0, or start a new run"
        )
    # Durable: later checkpoints are flushed, and are useless without it.
    with write_atomically(path) as file, restore_disk_error(path, SafetensorError):
        save_file(weights, file.name)


class Reference:
    """A copy in host memory of this rank's shards of a model's trained weights, pinned if they are on a GPU."""

    def __init__(self, model: nn.Module) -> None:
        shards = _shards(model)
        self._weights = {
            name: torch.empty(shard.shape, dtype=shard.dtype, device="cpu") for name, shard in shards.items()
        }
        if any(shard.is_cuda for shard in shards.values()):
            _pin(self, list(self._weights.values()))  # before the copy, which is then several times as fast
        for name, shard in shards.items():
            self._weights[name].copy_(shard)

    @contextmanager
    def in_place_of(self, model: nn.Module, reshard: Callable[[], None]) -> Iterator[None]:
        """Gives `model` these weights inside the block, and its own again afterwards, also after an error.

        `reshard` frees gathered weights, which would otherwise be used instead of the swapped shards.
        """
        reshard()
        self.swap_with(model)
        try:
            yield
        finally:
            reshard()
            self.swap_with(model)

    def swap_with(self, model: nn.Module) -> None:
        """Exchanges these weights and the model's in place, one tensor at a time: a second copy would double the memory."""
        with torch.no_grad():
            for name, shard in _shards(model).items():
                own = shard.clone()
                shard.copy_(self._weights[name])
                self._weights[name].copy_(own)


def _pin(owner: object, tensors: list[Tensor]) -> None:
    """Pins the tensors' memory until `owner` is gone: pinned memory copies at the bus's full speed, in every step with a KL term.

    torch's own pinned memory would be rounded up to powers of two.
    """
    pinned = [one for one in tensors if one.numel() and pin_memory(one.data_ptr(), one.nbytes)]
    # The tensors are arguments, so their memory is not freed before it is unpinned.
    weakref.finalize(owner, _unpin, pinned).atexit = False


def _unpin(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        unpin_memory(tensor.data_ptr())


def _shards(model: nn.Module) -> Weights:
    with torch.no_grad():
        return {
            name: local(parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
        }
