"""What turns final states into logits: a matrix over the vocabulary, and what some families do to the result."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """logits = softcap(scale * (hidden @ weight.T + bias))."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @property
    def plain(self) -> bool:
        """Whether logits are a product and no more."""
        return self.bias_V is None and self.scale == 1.0 and self.softcap is None

    def logits(self, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, self.weight_VH, self.bias_V)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits
