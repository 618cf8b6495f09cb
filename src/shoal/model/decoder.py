"""The forward pass of the Llama, Qwen2 and Qwen3 families, for training, checking and generating.

Parameters have Hugging Face's names, so checkpoints can be exchanged. The three uses differ only in what a token attends to:

    plain    all earlier tokens of its row
    packed   earlier tokens of its own segment: several samples lie in one row
    cached   the KV cache of its slot
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from shoal.model.logprobs import LogitHead
from shoal.model.rope import rope_table
from shoal.model.shape import Shape

LONG = 8192
"""From this mean segment length on, one call of torch's attention per segment is faster than one call of the flash kernel for
all segments (measured)."""


class RMSNorm(nn.Module):
    """Scales a vector to a root mean square of 1, then by a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.fused = False
        """Whether to use torch's kernel, which saves less for the backward pass and rounds once instead of twice; for training."""

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


class KVCache:
    """Keys and values of the tokens computed so far, one slot per row.

        keys[layer, slot, position, kv head, :]

    A forward pass over B rows uses slots 0 .. B-1 and reads positions 0 .. context-1, each row only up to its own token.
    Positions after a row's token are written before they are read, so nothing is ever cleared. Set `context` before each
    forward pass to the number of positions of the longest row, new tokens included.
    """

    def __init__(self, decoder: "Decoder", *, num_slots: int, max_context: int) -> None:
        shape, like = decoder.shape, decoder.model.norm.weight
        size = (shape.num_layers, num_slots, max_context, shape.num_kv_heads, shape.head_dim)
        # Not new_empty: a NaN in unwritten memory would pass through the mask, since 0 * NaN is NaN.
        self.keys_LSCKD, self.values_LSCKD = (like.new_zeros(size) for _ in range(2))
        self.max_context = self.context = max_context

    def write(
        self, layer: int, positions_BT: Tensor, keys_BTKD: Tensor, values_BTKD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Stores new keys and values; returns all that the rows may attend to, [B, context, K, D] each."""
        num_rows = positions_BT.shape[0]
        rows_B1 = torch.arange(num_rows, device=positions_BT.device)[:, None]
        all_keys, all_values = self.keys_LSCKD[layer, :num_rows], self.values_LSCKD[layer, :num_rows]
        all_keys[rows_B1, positions_BT] = keys_BTKD
        all_values[rows_B1, positions_BT] = values_BTKD
        return all_keys[:, : self.context], all_values[:, : self.context]

    def copy_from(self, source: "KVCache", *, source_slots: Tensor, slots: Tensor, context: int) -> None:
        """Copies positions 0 .. context-1 of `source_slots` of a cache, which may be this one, to `slots`."""
        self.keys_LSCKD[:, slots, :context] = source.keys_LSCKD[:, source_slots, :context]
        self.values_LSCKD[:, slots, :context] = source.values_LSCKD[:, source_slots, :context]


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of packed rows that are laid end to end. Replaces a T x T mask.

        segment ids   0 0 0 1 1 -1 | 0 0 0 0 0 0         two rows of six tokens
        starts        0     3    5   6            12     where equal ids begin, and the end

    The flash kernels take the starts and compute only the blocks inside each segment.
    """

    starts_S: Tensor
    """Starts and the end, int32; padded with the end to a power of two, so that few shapes are compiled."""
    longest: int
    """Length of the longest segment, rounded up to a power of two."""
    spans: tuple[tuple[int, int], ...]
    """Start and end of each segment if there are few long ones, else empty."""


Projection = Callable[..., tuple[Tensor, ...]]
"""Computes linear layers that read the same input, as `project` does."""


class AttentionInputs:
    """Positions, rotations and what each token may attend to, made once per forward pass and used by every layer.

    Not a dataclass: torch.distributed would cast the tensors in one.
    """

    def __init__(
        self,
        rope_BT1D: tuple[Tensor, Tensor],
        mask_B1TC: Tensor | None,
        cache: KVCache | None,
        positions_BT: Tensor,
        segments: Segments | None = None,
    ) -> None:
        self.rope_BT1D = rope_BT1D
        self.mask_B1TC, self.segments = mask_B1TC, segments
        """The segments are used instead of the mask where a flash kernel runs."""
        self.cache, self.positions_BT = cache, positions_BT


def project(x: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
    """Returns the result of each of the linear layers, which all read `x`. A trainer of adapters replaces this function."""
    return tuple(linear(x) for linear in linears)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = shape.head_dim
        self.num_heads, self.num_kv_heads = shape.num_heads, shape.num_kv_heads
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, q_size, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None
        self.project: Projection = project
        self.fused = False
        """Whether to rotate in one kernel; for training."""

    def forward(self, x_BTH: Tensor, inputs: AttentionInputs) -> Tensor:
        rows, length = x_BTH.shape[:2]
        q_BTQ, k_BTK, v_BTK = self.project(x_BTH, self.q_proj, self.k_proj, self.v_proj)
        q_BTND = q_BTQ.view(rows, length, self.num_heads, self.head_dim)
        k_BTKD = k_BTK.view(rows, length, self.num_kv_heads, self.head_dim)
        v_BTKD = v_BTK.view(rows, length, self.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTND, k_BTKD = self.q_norm(q_BTND), self.k_norm(k_BTKD)
        turn = rotate_fused if self.fused and not torch.compiler.is_compiling() else rotate
        q_BTND, k_BTKD = turn(q_BTND, inputs.rope_BT1D), turn(k_BTKD, inputs.rope_BT1D)
        if inputs.cache is not None:
            k_BTKD, v_BTKD = inputs.cache.write(self.layer, inputs.positions_BT, k_BTKD, v_BTKD)
        if inputs.segments is not None:
            out_BTND = attend_segments(q_BTND, k_BTKD, v_BTKD, inputs.segments)
        else:
            out_BTND = attend(q_BTND, k_BTKD, v_BTKD, inputs.mask_B1TC)
        return self.project(out_BTND.flatten(2), self.o_proj)[0]


class MLP(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.down_proj = nn.Linear(shape.ffn_size, shape.hidden_size, bias=False)
        self.project: Projection = project
        self.fused = False
        """Whether to gate in one kernel, which keeps one result less for the backward pass; for training."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.project(x, self.gate_proj, self.up_proj)
        if self.fused and not torch.compiler.is_compiling():
            gated: Tensor = _Gate.apply(gate, up)  # type: ignore[no-untyped-call]
        else:
            gated = F.silu(gate) * up
        return self.project(gated, self.down_proj)[0]


class Layer(nn.Module):
    """One transformer layer: attention and MLP, each with a norm before and a residual connection."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(shape, layer)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, x_BTH: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BTH = x_BTH + self.self_attn(self.input_layernorm(x_BTH), inputs)
        return x_BTH + self.mlp(self.post_attention_layernorm(x_BTH))  # type: ignore[no-any-return]


class Trunk(nn.Module):
    """Embedding, layers and final norm. A module of its own so that its parameters are named `model.*`, as Hugging Face's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        embed_VH = torch.empty(shape.vocab_size, shape.hidden_size)
        # Drawing on the meta device makes torch import its compiler, which takes seconds.
        if not embed_VH.is_meta:
            nn.init.normal_(embed_VH)
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size, _weight=embed_VH)
        self.layers = nn.ModuleList(Layer(shape, layer) for layer in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)


class Decoder(nn.Module):
    """A causal language model. `forward` returns the states after the final norm, `logits` turns states into logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.lm_head = (
            None if shape.tied_embeddings else nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        )
        self._rope_P2D: Tensor | None = None

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        *,
        segments_BT: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Returns the states after the final norm, [B, T, H].

        Without options attention is causal over the row. `segments_BT`: causal among tokens of equal id in the row; padding
        (id -1) attends to padding, since a token that attends to nothing would get NaN. `cache`: rows continue what their slot
        holds; a token attends to cached positions up to its own.
        """
        assert segments_BT is None or cache is None, "packed rows have no cache"
        inputs = self._attention_inputs(positions_BT, segments_BT, cache)
        x_BTH: Tensor = self.model.embed_tokens(tokens_BT)
        for layer in self.model.layers:
            x_BTH = layer(x_BTH, inputs)
        return self.model.norm(x_BTH)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits over the vocabulary, [..., V], of states [..., H], in the states' dtype."""
        return self.head().logits(hidden)

    def head(self) -> LogitHead:
        """Returns the matrix that turns states into logits."""
        last = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return LogitHead(weight_VH=last.weight)

    def blocks(self) -> list[nn.Module]:
        """Returns the layers, each of which may be sharded, compiled or recomputed on its own."""
        return list(self.model.layers)

    def _attention_inputs(
        self, positions_BT: Tensor, segments_BT: Tensor | None, cache: KVCache | None
    ) -> AttentionInputs:
        rope_BT1D = self._rope(positions_BT)
        if segments_BT is not None and supports_flash_attention(
            positions_BT.device, self.model.embed_tokens.weight.dtype
        ):
            return AttentionInputs(rope_BT1D, None, None, positions_BT, find_segments(segments_BT))
        mask_B1TC = _mask(positions_BT, segments_BT, cache)
        if mask_B1TC is not None and segments_BT is not None:
            # Every layer would convert a mask of bools to numbers, and keep its copy for the backward pass.
            numbers = torch.zeros(mask_B1TC.shape, dtype=rope_BT1D[0].dtype, device=mask_B1TC.device)
            mask_B1TC = numbers.masked_fill_(~mask_B1TC, -math.inf)
        return AttentionInputs(rope_BT1D, mask_B1TC, cache, positions_BT)

    def _rope(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        if self._rope_P2D is None or self._rope_P2D.device != positions_BT.device:
            self._rope_P2D = rope_table(self.shape).to(positions_BT.device)
        at_BT1E = self._rope_P2D[positions_BT][:, :, None].to(self.model.embed_tokens.weight.dtype)
        return at_BT1E[..., : self.shape.head_dim], at_BT1E[..., self.shape.head_dim :]


def run_prompts(
    decoder: Decoder, prompts: Sequence[Sequence[int]], cache: KVCache, *, chunk: int | None = None
) -> Tensor:
    """Computes prompts into the first slots of a cache, `chunk` positions at a time; returns the state at the end of each, [P, H]."""
    like, width = decoder.model.norm.weight, max(map(len, prompts))
    # Padding comes after the tokens: no token attends to it before it is overwritten.
    padded = [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts]
    tokens_PT = torch.tensor(padded, device=like.device)
    last_P = torch.tensor([len(prompt) - 1 for prompt in prompts], device=like.device)
    last_PH = like.new_empty(len(prompts), decoder.shape.hidden_size)
    for start in range(0, width, chunk or width):
        cache.context = min(start + (chunk or width), width)
        positions_PT = torch.arange(start, cache.context, device=like.device).expand(len(prompts), -1)
        states_PTH = decoder(tokens_PT[:, start : cache.context], positions_PT, cache=cache)
        here_P = (last_P >= start) & (last_P < cache.context)
        last_PH[here_P] = states_PTH[here_P, last_P[here_P] - start]
    return last_PH


def rotate(x_BTND: Tensor, rope_BT1D: tuple[Tensor, Tensor]) -> Tensor:
    """Returns queries or keys rotated by their positions."""
    cos, signed_sin = rope_BT1D
    swapped = torch.roll(x_BTND, x_BTND.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BTND * cos.to(x_BTND.dtype), swapped, signed_sin.to(x_BTND.dtype))


def rotate_fused(x_BTND: Tensor, rope_BT1D: tuple[Tensor, Tensor]) -> Tensor:
    """Returns what `rotate` returns, on CUDA in one kernel forward and one backward."""
    if not x_BTND.is_cuda:
        return rotate(x_BTND, rope_BT1D)
    rotated: Tensor = _Rotate.apply(x_BTND, *rope_BT1D)  # type: ignore[no-untyped-call]
    return rotated


class _Rotate(torch.autograd.Function):
    """Rotates heads on CUDA. The gradient is rotated back: by the same cosines and negated sines."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_BTND: Tensor, cos_BT1D: Tensor, signed_sin_BT1D: Tensor) -> Tensor:
        from shoal.model.kernels.elementwise import rotate_heads

        ctx.save_for_backward(cos_BT1D, signed_sin_BT1D)
        return rotate_heads(x_BTND, cos_BT1D, signed_sin_BT1D, sign=1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from shoal.model.kernels.elementwise import rotate_heads

        return rotate_heads(gradients[0], *ctx.saved_tensors, sign=-1.0), None, None


class _Gate(torch.autograd.Function):
    """Computes silu(gate) * up, and keeps only gate and up for the backward pass."""

    @staticmethod
    def forward(ctx: FunctionCtx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        if not gate.is_cuda:
            return F.silu(gate) * up
        from shoal.model.kernels.elementwise import gate_product

        return gate_product(gate, up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if not gate.is_cuda:
            of_gate = torch.ops.aten.silu_backward(gradients[0] * up, gate)
            return of_gate, gradients[0] * F.silu(gate)
        from shoal.model.kernels.elementwise import gate_gradients

        return gate_gradients(gate, up, gradients[0])


def attend(q_BTND: Tensor, k_BCKD: Tensor, v_BCKD: Tensor, mask_B1TC: Tensor | None) -> Tensor:
    """Returns grouped-query attention, [B, T, N, D]; causal if the mask is None."""
    num_heads, num_kv_heads = q_BTND.shape[2], k_BCKD.shape[2]
    shared = num_heads // num_kv_heads
    if q_BTND.shape[1] == 1 and mask_B1TC is not None:
        # One new token per row: passes heads that share keys as query positions, so that no key is copied.
        q_BKGD = q_BTND.reshape(-1, num_kv_heads, shared, q_BTND.shape[3])
        out_BKGD = F.scaled_dot_product_attention(
            q_BKGD, k_BCKD.transpose(1, 2), v_BCKD.transpose(1, 2), attn_mask=mask_B1TC
        )
        return out_BKGD.flatten(1, 2).unsqueeze(1)
    k_BNCD = k_BCKD.transpose(1, 2).repeat_interleave(shared, dim=1) if shared > 1 else k_BCKD.transpose(1, 2)
    v_BNCD = v_BCKD.transpose(1, 2).repeat_interleave(shared, dim=1) if shared > 1 else v_BCKD.transpose(1, 2)
    out_BNTD = F.scaled_dot_product_attention(
        q_BTND.transpose(1, 2), k_BNCD, v_BNCD, attn_mask=mask_B1TC, is_causal=mask_B1TC is None
    )
    return out_BNTD.transpose(1, 2)


def _mask(positions_BT: Tensor, segments_BT: Tensor | None, cache: KVCache | None) -> Tensor | None:
    """Returns which tokens attend to which, [B, 1, T, C], or None for plain causal attention."""
    if cache is not None:
        cached_C = torch.arange(cache.context, device=positions_BT.device)
        return (cached_C <= positions_BT[:, :, None])[:, None]
    if segments_BT is None:
        return None
    length = segments_BT.shape[1]
    causal_TT = torch.ones(length, length, dtype=torch.bool, device=segments_BT.device).tril()
    return (causal_TT & (segments_BT[:, :, None] == segments_BT[:, None, :]))[:, None]


def supports_flash_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether the flash kernels run here: CUDA and 16-bit floats. Elsewhere a dense mask gives the same states."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def find_segments(segments_BT: Tensor) -> Segments:
    """Finds the segments, runs of equal ids in a row. The tokens of a sample must be adjacent, as trainer/data/pack.py packs them."""
    change_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    change_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    starts = change_BT.flatten().nonzero().flatten().tolist()
    total = segments_BT.numel()
    ends = [*starts[1:], total]
    longest = max(end - start for start, end in zip(starts, ends, strict=True))
    size = _power_of_two(len(starts) + 1)
    starts_S = torch.tensor(starts + [total] * (size - len(starts)), dtype=torch.int32)
    spans = tuple(zip(starts, ends, strict=True)) if total >= LONG * len(starts) else ()
    return Segments(starts_S.to(segments_BT.device), _power_of_two(longest), spans)


def attend_segments(q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, segments: Segments) -> Tensor:
    """Returns causal grouped-query attention inside each segment, [B, T, N, D]."""
    q_TND, k_TKD, v_TKD = q_BTND.flatten(0, 1), k_BTKD.flatten(0, 1), v_BTKD.flatten(0, 1)
    if segments.spans:
        out_TND = attend_spans(q_TND, k_TKD, v_TKD, segments.spans)
    else:
        starts_S, longest = segments.starts_S, segments.longest
        out_TND = torch.ops.aten._flash_attention_forward(
            q_TND, k_TKD, v_TKD, starts_S, starts_S, longest, longest, 0.0, True, False
        )[0]
    return out_TND.view(q_BTND.shape)


def attend_spans(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Returns causal attention inside each span of tokens, [T, N, D], one span after another, in any dtype."""
    parts = []
    for a, b in spans:
        q_1NTD, k_1KTD, v_1KTD = (side[a:b].transpose(0, 1)[None] for side in (q_TND, k_TKD, v_TKD))
        gqa = q_TND.shape[1] != k_TKD.shape[1]
        out_1NTD = F.scaled_dot_product_attention(q_1NTD, k_1KTD, v_1KTD, is_causal=True, enable_gqa=gqa)
        parts.append(out_1NTD[0].transpose(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
