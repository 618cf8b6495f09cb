"""Log-probs of given tokens without ever holding the logits of all of them."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shoal.model.decoder import Decoder


def token_logprobs(
    decoder: Decoder, hidden_NH: Tensor, targets_N: Tensor, *, temperature: float, chunk: int = 4096
) -> Tensor:
    """log softmax(logits / temperature) at `targets_N`, float32.

    Logits exist for `chunk` tokens at a time and are computed again in the backward pass: 4,096 tokens of a
    49,152-word vocabulary are 0.8 GB in float32, a whole batch would be many times that.
    """

    def of_chunk(hidden: Tensor, targets: Tensor) -> Tensor:
        logits_NV = decoder.logits(hidden).float() / temperature
        return logits_NV.gather(1, targets[:, None]).squeeze(1) - logits_NV.logsumexp(-1)

    if hidden_NH.shape[0] <= chunk:
        return of_chunk(hidden_NH, targets_N)
    parts = [
        checkpoint(of_chunk, hidden, targets, use_reentrant=False)
        for hidden, targets in zip(torch.split(hidden_NH, chunk), torch.split(targets_N, chunk), strict=True)
    ]
    return torch.cat(parts)


def token_entropies(decoder: Decoder, hidden_NH: Tensor, *, temperature: float, chunk: int = 4096) -> Tensor:
    """Entropy of softmax(logits / temperature) at each state, float32, with gradient; in chunks as above."""

    def of_chunk(hidden: Tensor) -> Tensor:
        logp_NV = (decoder.logits(hidden).float() / temperature).log_softmax(-1)
        return -(logp_NV.exp() * logp_NV).sum(-1)

    parts = [
        checkpoint(of_chunk, hidden, use_reentrant=False) if torch.is_grad_enabled() else of_chunk(hidden)
        for hidden in torch.split(hidden_NH, chunk)
    ]
    return torch.cat(parts)
