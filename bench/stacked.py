"""Trains many workers of a small Llama as one batched model: all workers of a comparison take a step together.

Weights, gradients and AdamW's moments have one row per worker, [K, N]; a layer's matrix is a view of all K rows, and one
batched product computes all of them. Data-parallel workers are rows whose gradients are averaged. On CUDA a step is one
graph: data, learning rates and step counts are read on the device. Meant for comparing methods, not for training.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

BETAS, EPS, DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0
VALUES_AT_ONCE = {"cuda": 1 << 29, "cpu": 1 << 18}
"""Values that AdamW updates at once: what fits in a GPU's memory, or in a core's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama:
    """The shape of a byte-level Llama with tied embeddings, SwiGLU, RoPE and RMS norms."""

    hidden: int
    layers: int
    heads: int
    ffn: int
    sequence: int
    vocab: int = 256

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Returns names and shapes of the parameters, in their order in a row."""
        hidden, ffn = self.hidden, self.ffn
        found: list[tuple[str, tuple[int, ...]]] = [("embed", (self.vocab, hidden))]
        for at in range(self.layers):
            found += [
                (f"layers.{at}.norm1", (hidden,)),
                (f"layers.{at}.qkv", (3 * hidden, hidden)),
                (f"layers.{at}.out", (hidden, hidden)),
                (f"layers.{at}.norm2", (hidden,)),
                (f"layers.{at}.gate_up", (2 * ffn, hidden)),
                (f"layers.{at}.down", (hidden, ffn)),
            ]
        return [*found, ("norm", (hidden,))]

    @property
    def num_values(self) -> int:
        return sum(math.prod(shape) for _, shape in self.shapes())

    def first_weights(self, seed: int) -> Tensor:
        """Returns normal values with standard deviation 1/sqrt(inputs), smaller for outputs into the residual stream."""
        draw = torch.Generator().manual_seed(seed)
        parts = []
        for name, shape in self.shapes():
            if len(shape) == 1:
                parts.append(torch.ones(shape))
                continue
            scale = 1 / math.sqrt(shape[1])
            if name.endswith(("out", "down")):
                scale /= math.sqrt(2 * self.layers)
            parts.append((torch.randn(shape, generator=draw) * scale).flatten())
        return torch.cat(parts)

    def views(self, rows_KN: Tensor) -> dict[str, Tensor]:
        found, at = {}, 0
        for name, shape in self.shapes():
            num = math.prod(shape)
            found[name] = rows_KN[:, at : at + num].view(len(rows_KN), *shape)
            at += num
        return found

    def fragments(self, num: int) -> list[list[slice]]:
        """Returns the columns of each fragment: layers k, k + num, ...; other parameters go last (shoal.diloco.fragments)."""
        groups: list[list[slice]] = [[] for _ in range(num)]
        at = 0
        for name, shape in self.shapes():
            end = at + math.prod(shape)
            groups[int(name.split(".")[1]) % num if name.startswith("layers") else -1].append(slice(at, end))
            at = end
        return groups


def rope(sequence: int, head_dim: int, device: str | torch.device) -> tuple[Tensor, Tensor]:
    rates = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.outer(torch.arange(sequence, device=device), rates).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos_TD + rotated * sin_TD


def norm(x_KMH: Tensor, weight_KH: Tensor) -> Tensor:
    return F.rms_norm(x_KMH, (x_KMH.shape[-1],), eps=1e-5) * weight_KH[:, None]


def layer(x_KMH: Tensor, w: Sequence[Tensor], heads: int, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    norm1, qkv, out, norm2, gate_up, down = w
    num, rows, hidden = x_KMH.shape
    length = len(cos_TD)
    mixed = torch.bmm(norm(x_KMH, norm1), qkv.mT).view(-1, length, 3, heads, hidden // heads)
    q, k, v = (mixed[:, :, at].transpose(1, 2) for at in range(3))
    seen = F.scaled_dot_product_attention(
        rotate(q, cos_TD, sin_TD).to(v.dtype), rotate(k, cos_TD, sin_TD).to(v.dtype), v, is_causal=True
    )
    x_KMH = x_KMH + torch.bmm(seen.transpose(1, 2).reshape(num, rows, hidden), out.mT)
    gate, up = torch.bmm(norm(x_KMH, norm2), gate_up.mT).chunk(2, -1)
    return x_KMH + torch.bmm(F.silu(gate) * up, down.mT)


def losses(llama: Llama, w: dict[str, Tensor], tokens_KBT: Tensor, run_layer: Any = layer) -> Tensor:
    """Returns the mean next-token cross-entropy of each row of weights on its own samples, [K]."""
    num = len(tokens_KBT)
    inputs, targets = tokens_KBT[..., :-1].reshape(num, -1), tokens_KBT[..., 1:].reshape(num, -1)
    cos_TD, sin_TD = rope(llama.sequence, llama.hidden // llama.heads, tokens_KBT.device)
    embed = w["embed"]
    # With 256 tokens a one-hot product is as fast as a lookup, and its backward pass is deterministic.
    chosen_KMV = inputs[..., None] == torch.arange(llama.vocab, device=inputs.device)
    x_KMH = torch.bmm(chosen_KMV.to(embed.dtype), embed)
    names = ("norm1", "qkv", "out", "norm2", "gate_up", "down")
    for at in range(llama.layers):
        x_KMH = run_layer(x_KMH, [w[f"layers.{at}.{name}"] for name in names], llama.heads, cos_TD, sin_TD)
    logits_KMV = torch.bmm(norm(x_KMH, w["norm"]), embed.mT)
    each = F.cross_entropy(logits_KMV.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return each.view(num, -1).mean(1)


def adamw(
    rows: tuple[Tensor, Tensor, Tensor], grad_KN: Tensor, rate_K1: Tensor, step: Tensor, half_KN: Tensor
) -> None:
    """Clips and takes one AdamW step in place; `half_KN` receives the new weights in the dtype of the products."""
    weights_KN, first_KN, second_KN = rows
    grad_KN = grad_KN.float()
    grad_KN = grad_KN * (CLIP / (grad_KN.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)
    first_KN.mul_(BETAS[0]).add_(grad_KN * (1 - BETAS[0]))
    second_KN.mul_(BETAS[1]).add_(grad_KN * grad_KN * (1 - BETAS[1]))
    first = first_KN / (1 - BETAS[0] ** step)
    second = second_KN / (1 - BETAS[1] ** step)
    weights_KN.copy_(weights_KN * (1 - rate_K1 * DECAY) - rate_K1 * first / (second.sqrt() + EPS))
    half_KN.copy_(weights_KN)


class Stack:
    """K workers that step together. `mean_of`: groups of rows whose gradients are averaged (data parallel)."""

    def __init__(
        self,
        llama: Llama,
        rows_KN: Tensor,
        *,
        text: Tensor,
        starts_SWB: Tensor,
        worker_K: Sequence[int],
        rates_S: Tensor,
        scale_K: Sequence[float] | None = None,
        mean_of: Sequence[slice] = (),
        dtype: torch.dtype = torch.float32,
        compiled: bool = False,
        graph: bool = True,
    ) -> None:
        device = rows_KN.device
        self.llama, self.mean_of = llama, mean_of
        self.weights = rows_KN
        self.first, self.second = torch.zeros_like(rows_KN), torch.zeros_like(rows_KN)
        self.half = rows_KN.to(dtype, copy=True)
        self.grad = torch.zeros_like(self.half)
        self._leaves = {name: view.detach() for name, view in llama.views(self.half).items()}
        for name, view in llama.views(self.grad).items():
            self._leaves[name].requires_grad_().grad = view
        self._text, self._starts, self._rates = text, starts_SWB, rates_S
        self._worker = torch.tensor(list(worker_K), device=device)
        self._scale = torch.tensor(list(scale_K or [1.0] * len(rows_KN)), device=device)[:, None]
        self._reach = torch.arange(llama.sequence + 1, device=device)
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        """The number of the next step. It is on the device, because a graph replays without the host."""
        self.loss = torch.zeros(len(rows_KN), device=device)
        self._layer = torch.compile(layer, dynamic=False) if compiled else layer
        self._adamw = torch.compile(adamw, dynamic=False) if compiled else adamw
        self._use_graph = graph and device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None

    def restart(self, rows_KN: Tensor) -> None:
        """Restarts from these weights at step 0 with empty moments."""
        self.weights.copy_(rows_KN.expand_as(self.weights))
        for tensor in (self.first, self.second, self.at):
            tensor.zero_()
        self.refresh()

    def refresh(self) -> None:
        """Copies weights that were written from outside into the dtype of the products."""
        self.half.copy_(self.weights)

    def step(self) -> None:
        if not self._use_graph:
            self._step()
            return
        if self._graph is None:
            self._capture()
        assert self._graph is not None
        self._graph.replay()

    def _step(self) -> None:
        at = self.at
        starts_KB = self._starts.index_select(0, at)[0, self._worker]
        tokens_KBT = self._text[starts_KB[..., None] + self._reach].long()
        self.grad.zero_()
        loss_K = losses(self.llama, self._leaves, tokens_KBT, self._layer)
        loss_K.sum().backward()
        with torch.no_grad():
            self.loss.copy_(loss_K)
            for rows in self.mean_of:
                self.grad[rows] = self.grad[rows].float().mean(0).to(self.grad.dtype)
            step = (at + 1).float()
            rates = self._rates.index_select(0, at) * self._scale
            # A few rows at a time: AdamW's intermediate values for all rows of a large model would not fit in memory.
            take = max(1, VALUES_AT_ONCE[self.weights.device.type] // self.weights.shape[1])
            for start in range(0, len(self.weights), take):
                some = slice(start, start + take)
                self._adamw(
                    (self.weights[some], self.first[some], self.second[some]),
                    self.grad[some],
                    rates[some],
                    step,
                    self.half[some],
                )
            at += 1

    def _capture(self) -> None:
        """Captures the graph. The warm-up steps on a side stream are undone, so that only replays count."""
        kept = [tensor.clone() for tensor in (self.weights, self.first, self.second, self.half, self.at)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.empty_cache()  # the graph allocates its own memory
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        for tensor, value in zip(
            (self.weights, self.first, self.second, self.half, self.at), kept, strict=True
        ):
            tensor.copy_(value)
        self._graph = graph


@torch.no_grad()
def validation_losses(
    llama: Llama, rows_KN: Tensor, tokens_NT: Tensor, batch: int, dtype: torch.dtype
) -> list[float]:
    views = llama.views(rows_KN.to(dtype))
    total_K = torch.zeros(len(rows_KN), device=rows_KN.device)
    for at in range(0, len(tokens_NT), batch):
        part = tokens_NT[at : at + batch].long()
        total_K += losses(llama, views, part.expand(len(rows_KN), *part.shape)) * len(part)
    return (total_K / len(tokens_NT)).tolist()
