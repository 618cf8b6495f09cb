"""Logits from states, and log-probs and entropies of given tokens without holding the logits of all tokens at once.

N tokens, V vocabulary entries, H hidden size.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHUNK = 4096
FEW_LOGITS = 1 << 24
"""On a CPU, up to this many logits are kept for the backward pass instead of being recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitHead:
    """Turns final states into logits: softcap(scale * (hidden @ weight.T + bias))."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits, [..., V], of states [..., H]."""
        logits = F.linear(hidden, self.weight_VH, self.bias_V)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


class HasHead(Protocol):
    """A model whose states a LogitHead turns into logits."""

    def head(self) -> LogitHead: ...


class TokenScores(NamedTuple):
    """Log-probability and entropy of each token; the entropy without a gradient if `token_scores` was called so."""

    logprobs_N: Tensor
    """log softmax(logits / temperature) at the token; float32."""
    entropy_N: Tensor
    """Entropy in nats of the distribution that the token was drawn from; float32."""


def token_logprobs(
    model: HasHead, hidden_NH: Tensor, targets_N: Tensor, *, temperature: float, chunk: int = CHUNK
) -> Tensor:
    """Returns log softmax(logits / temperature) at `targets_N`, float32."""
    return token_scores(model, hidden_NH, targets_N, temperature=temperature, chunk=chunk).logprobs_N


def token_scores(
    model: HasHead,
    hidden_NH: Tensor,
    targets_N: Tensor,
    *,
    temperature: float,
    chunk: int = CHUNK,
    entropy_gradient: bool = True,
) -> TokenScores:
    """Returns log-prob and entropy of every token.

    Logits exist for `chunk` tokens at a time and are recomputed in the backward pass: for 4,096 tokens and a vocabulary of
    49,152 they take 0.8 GB in float32, for a whole batch many times that. Without `entropy_gradient` the entropies are only
    figures; then a frozen head needs its logits once.
    """
    head = model.head()
    num_logits = hidden_NH.shape[0] * head.weight_VH.shape[0]
    if hidden_NH.shape[0] <= chunk and num_logits <= FEW_LOGITS and not hidden_NH.is_cuda:
        return _scores(head.logits(hidden_NH), targets_N, temperature)
    if head.bias_V is None and head.softcap is None:
        # Plain products have the hand-written gradient below, which needs no float32 copy of the logits.
        logprobs_N, entropy_N = _Scores.apply(  # type: ignore[no-untyped-call]
            hidden_NH, head.weight_VH, targets_N, temperature / head.scale, chunk, entropy_gradient
        )
        return TokenScores(logprobs_N, entropy_N)
    parts = [
        checkpoint(lambda h, t: _scores(head.logits(h), t, temperature), hidden, targets, use_reentrant=False)
        for hidden, targets in zip(torch.split(hidden_NH, chunk), torch.split(targets_N, chunk), strict=True)
    ]
    return TokenScores(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _scores(logits_NV: Tensor, targets_N: Tensor, temperature: float) -> TokenScores:
    logprobs_N, _, entropy_N = _reduced_by_torch(logits_NV, targets_N, temperature)
    return TokenScores(logprobs_N, entropy_N)


def _reduced_by_torch(
    logits_NV: Tensor, targets_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-prob, log-sum-exp and entropy of each row, with gradient."""
    z_NV = logits_NV.float() / temperature
    lse_N = z_NV.logsumexp(-1)
    logprobs_N = z_NV.gather(1, targets_N[:, None]).squeeze(1) - lse_N
    logp_NV = z_NV - lse_N[:, None]
    return logprobs_N, lse_N, -(logp_NV.exp() * logp_NV).sum(-1)


class _Scores(torch.autograd.Function):
    """Computes log-probs and entropies with a hand-written gradient.

    With z = logits / temperature, p = softmax(z), H the entropy, g and e the gradients to log-prob and entropy:

        dz_j = g (1[j = target] - p_j) - e p_j (log p_j + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        temperature: float,
        chunk: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        # For a frozen matrix the gradient of a token's log-prob to its state is computed while the logits are there: computing
        # them again would take a third of the products with the matrix.
        at_once = wants_hidden and not wants_weight and not entropy_gradient
        parts, of_hidden = [], []
        for hidden, targets in zip(torch.split(hidden_NH, chunk), torch.split(targets_N, chunk), strict=True):
            logits_NV = hidden @ weight_VH.T
            parts.append(_reduced(logits_NV, targets, temperature))
            if at_once:
                reduced, ones_N = parts[-1][1:], torch.ones_like(parts[-1][1])
                d_NV = _gradient(logits_NV, targets, reduced, (ones_N, torch.zeros_like(ones_N)), temperature)
                of_hidden.append(d_NV @ weight_VH)
        logprobs_N, lse_N, entropy_N = (torch.cat(part) for part in zip(*parts, strict=True))
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        if at_once:
            ctx.save_for_backward(torch.cat(of_hidden))
        else:
            ctx.save_for_backward(hidden_NH, weight_VH, targets_N, lse_N, entropy_N)
        ctx.set_materialize_grads(False)
        ctx.at_once, ctx.temperature, ctx.chunk = at_once, temperature, chunk
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.at_once:
            (unit_NH,) = ctx.saved_tensors
            assert given[0] is not None, "entropies have no gradient here"
            return (given[0][:, None] * unit_NH).to(unit_NH.dtype), None, None, None, None, None
        hidden_NH, weight_VH, targets_N, lse_N, entropy_N = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        gradients = [torch.zeros_like(lse_N) if one is None else one for one in given]
        d_hidden_NH = torch.empty_like(hidden_NH) if wants_hidden else None
        # Chunks are summed in float32: in bfloat16 a later chunk's small values would be rounded away.
        d_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if wants_weight else None
        for first in range(0, hidden_NH.shape[0], ctx.chunk):
            at = slice(first, first + ctx.chunk)
            d_logits_NV = _gradient(
                hidden_NH[at] @ weight_VH.T,
                targets_N[at],
                (lse_N[at], entropy_N[at]),
                (gradients[0][at].contiguous(), gradients[1][at].contiguous()),
                ctx.temperature,
            )
            if d_hidden_NH is not None:
                torch.mm(d_logits_NV, weight_VH, out=d_hidden_NH[at])
            if d_weight_VH is not None:
                d_weight_VH += d_logits_NV.T @ hidden_NH[at]
        if d_weight_VH is not None:
            d_weight_VH = d_weight_VH.to(weight_VH.dtype)
        return d_hidden_NH, d_weight_VH, None, None, None, None


def _reduced(logits_NV: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-prob, log-sum-exp and entropy of each row."""
    if logits_NV.is_cuda:
        from shoal.model.kernels.logits import reduce_rows

        return reduce_rows(logits_NV, targets_N, temperature)
    return _reduced_by_torch(logits_NV, targets_N, temperature)


def _gradient(
    logits_NV: Tensor,
    targets_N: Tensor,
    reduced: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor],
    temperature: float,
) -> Tensor:
    """Returns the gradient to the logits, in their dtype."""
    if logits_NV.is_cuda:
        from shoal.model.kernels.logits import gradient_rows

        return gradient_rows(logits_NV, targets_N, reduced, gradients, temperature)
    lse_N1, entropy_N1 = (one[:, None] for one in reduced)
    of_logprob_N1, of_entropy_N1 = (one[:, None] for one in gradients)
    logp_NV = logits_NV.float() / temperature - lse_N1
    p_NV = logp_NV.exp()
    d_NV = -p_NV * (of_logprob_N1 + of_entropy_N1 * (logp_NV + entropy_N1))
    d_NV.scatter_add_(1, targets_N[:, None], of_logprob_N1)
    return (d_NV / temperature).to(logits_NV.dtype)
