"""The forward pass of the Llama/Qwen2/Qwen3 family, once, for training, checking and generating.

Parameter names are Hugging Face's, so a checkpoint is one of theirs and the reverse. The three uses differ only in
what a token may look at: all before it in its row (plain), those of its own segment (packed), or a KV cache.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.model.head import Head
from shoal.model.kv_cache import KVCache
from shoal.model.packed_segments import Segments, attend_segments, find_segments, runs_kernel
from shoal.model.shape import Shape


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.fused = False
        """One kernel that keeps less for the backward pass and rounds once instead of twice: for training."""

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


class Sight:
    """What the tokens of one forward pass may look at, and where they stand. Made once, used by every layer."""

    def __init__(
        self,
        rope_BT1D: tuple[Tensor, Tensor],
        mask_B1TC: Tensor | None,
        cache: KVCache | None,
        positions_BT: Tensor,
        segments: Segments | None = None,
    ) -> None:
        self.rope_BT1D = rope_BT1D
        self.mask_B1TC = mask_B1TC
        self.cache = cache
        self.positions_BT = positions_BT
        self.segments = segments
        """Stands for the mask where a kernel takes the samples' bounds instead."""


class Attention(nn.Module):
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

    def forward(self, x_BTH: Tensor, sight: Sight) -> Tensor:
        rows, length = x_BTH.shape[:2]
        q_BTND = self.q_proj(x_BTH).view(rows, length, self.num_heads, self.head_dim)
        k_BTKD = self.k_proj(x_BTH).view(rows, length, self.num_kv_heads, self.head_dim)
        v_BTKD = self.v_proj(x_BTH).view(rows, length, self.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTND, k_BTKD = self.q_norm(q_BTND), self.k_norm(k_BTKD)
        q_BTND, k_BTKD = rotate(q_BTND, sight.rope_BT1D), rotate(k_BTKD, sight.rope_BT1D)
        if sight.cache is not None:
            k_BTKD, v_BTKD = sight.cache.write(self.layer, sight.positions_BT, k_BTKD, v_BTKD)
        if sight.segments is not None:
            out_BTND = attend_segments(q_BTND, k_BTKD, v_BTKD, sight.segments)
        else:
            out_BTND = attend(q_BTND, k_BTKD, v_BTKD, sight.mask_B1TC)
        return self.o_proj(out_BTND.flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.down_proj = nn.Linear(shape.ffn_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(shape, layer)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, x_BTH: Tensor, sight: Sight) -> Tensor:
        x_BTH = x_BTH + self.self_attn(self.input_layernorm(x_BTH), sight)
        return x_BTH + self.mlp(self.post_attention_layernorm(x_BTH))  # type: ignore[no-any-return]


class Trunk(nn.Module):
    """All but the head. Exists so that parameters carry the `model.` of Hugging Face's names."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        embed_VH = torch.empty(shape.vocab_size, shape.hidden_size)
        if not embed_VH.is_meta:  # to draw on no device torch imports its compiler, which takes seconds
            nn.init.normal_(embed_VH)
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size, _weight=embed_VH)
        self.layers = nn.ModuleList(Layer(shape, layer) for layer in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)


class Decoder(nn.Module):
    """A causal language model. `forward` gives final-norm states, `logits` turns states into logits."""

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
        """States after the final norm, [B, T, H].

        Plain: causal over the row. `segments_BT`: causal among tokens of equal id in the row; padding (id -1) sees
        only padding, so no token sees nothing and no state is NaN. `cache`: rows go on from what their slot holds;
        a token sees cached positions up to its own.
        """
        assert segments_BT is None or cache is None, "packed rows have no cache"
        sight = self._sight(positions_BT, segments_BT, cache)
        x_BTH: Tensor = self.model.embed_tokens(tokens_BT)
        for layer in self.model.layers:
            x_BTH = layer(x_BTH, sight)
        return self.model.norm(x_BTH)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the vocabulary, [..., V], for states [..., H]; in the states' dtype."""
        return self.head().logits(hidden)

    def head(self) -> Head:
        last = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return Head(weight_VH=last.weight)

    def blocks(self) -> list[nn.Module]:
        """The layers, each of which may be sharded, compiled or computed again on its own."""
        return list(self.model.layers)

    def _sight(self, positions_BT: Tensor, segments_BT: Tensor | None, cache: KVCache | None) -> Sight:
        rope_BT1D = self._rope(positions_BT)
        if segments_BT is not None and runs_kernel(positions_BT.device, self.model.embed_tokens.weight.dtype):
            return Sight(rope_BT1D, None, None, positions_BT, find_segments(segments_BT))
        return Sight(rope_BT1D, _mask(positions_BT, segments_BT, cache), cache, positions_BT)

    def _rope(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        if self._rope_P2D is None or self._rope_P2D.device != positions_BT.device:
            self._rope_P2D = rope_table(self.shape).to(positions_BT.device)
        at_BT1E = self._rope_P2D[positions_BT][:, :, None].to(self.model.embed_tokens.weight.dtype)
        return at_BT1E[..., : self.shape.head_dim], at_BT1E[..., self.shape.head_dim :]


def rope_table(shape: Shape) -> Tensor:
    """Cosines and signed sines of every position, [positions, 2 D], float32, computed on the CPU for all devices.

    With the sign in the table (- for the first half), rotating is x * cos + swapped halves of x * sin.
    """
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64, device="cpu").float() / shape.head_dim
    frequencies = 1.0 / (shape.rope_theta**exponents)
    angles = torch.arange(shape.max_positions, device="cpu").float()[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos, -sin, sin), dim=1)


def rotate(x_BTND: Tensor, rope_BT1D: tuple[Tensor, Tensor]) -> Tensor:
    cos, signed_sin = rope_BT1D
    swapped = torch.roll(x_BTND, x_BTND.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BTND * cos.to(x_BTND.dtype), swapped, signed_sin.to(x_BTND.dtype))


def attend(q_BTND: Tensor, k_BCKD: Tensor, v_BCKD: Tensor, mask_B1TC: Tensor | None) -> Tensor:
    """Grouped-query attention; None as mask means causal."""
    num_heads, num_kv_heads = q_BTND.shape[2], k_BCKD.shape[2]
    shared = num_heads // num_kv_heads
    if q_BTND.shape[1] == 1 and mask_B1TC is not None:
        # One new token a row: heads that share keys stand in for query positions, so no key is copied.
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
    """Which tokens see which, [B, 1, T, C], or None for plain causal."""
    if cache is not None:
        cached_C = torch.arange(cache.context, device=positions_BT.device)
        return (cached_C <= positions_BT[:, :, None])[:, None]
    if segments_BT is None:
        return None
    length = segments_BT.shape[1]
    causal_TT = torch.ones(length, length, dtype=torch.bool, device=segments_BT.device).tril()
    return (causal_TT & (segments_BT[:, :, None] == segments_BT[:, None, :]))[:, None]
