"""Tables that the host makes, on their way to a device."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """To a device without waiting for it: from pageable memory the copy would wait for all work queued so far."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
