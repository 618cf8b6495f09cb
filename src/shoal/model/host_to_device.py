"""Tables that the host makes, on their way to a device."""

import struct
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def flat(rows: Iterable[Sequence[int]]) -> npt.NDArray[np.int32]:
    """The numbers of all rows, end to end. NumPy takes twice as long to read a row of Python's numbers."""
    return np.frombuffer(b"".join(struct.pack(f"{len(row)}i", *row) for row in rows), dtype=np.int32)


def upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """To a device without waiting for it: from pageable memory the copy would wait for all work queued so far."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
