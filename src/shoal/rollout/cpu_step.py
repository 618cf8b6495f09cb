"""One decode step on a CPU: one token for every row, a few large operations, nothing per row in Python.

A row has its prompt's keys and values in its own slot: one product over all that it may look at beats two over parts.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.model.decoder import Decoder
from shoal.model.fused import FusedLayer, FusedWeights
from shoal.rollout.engine import Request
from shoal.rollout.rows import Prompt, length_batches
from shoal.rollout.sampling import draw_tokens
from shoal.rollout.shelf import Batch, prefill
from shoal.rollout.slots import Slots


class CpuStep:
    """Steps the rows in slots 0 .. num_rows-1, all of which must be running."""

    gapless = True
    """Every slot up to the last costs a step's time, so gaps are closed."""
    lookahead = 0
    """What a step has done is known when it returns."""

    def __init__(self, decoder: Decoder, weights: FusedWeights, slots: Slots, is_end_V: Tensor) -> None:
        """`weights` are the decoder's own."""
        self._decoder, self._weights, self._slots, self._is_end_V = decoder, weights, slots, is_end_V

    def decode(self, num_rows: int) -> None:
        weights, slots = self._weights, self._slots
        shape = weights.shape
        rows_B, positions_B = slots.index_S[:num_rows], slots.positions_S[:num_rows]
        context = int(positions_B.max()) + 1
        mask_B11C = (slots.index_C[:context] <= positions_B[:, None])[:, None, None]
        rope_B1E = weights.rope_PE[positions_B][:, None]
        rope = rope_B1E[..., : shape.head_dim], rope_B1E[..., shape.head_dim :]
        x_BH = F.embedding(slots.newest_S[:num_rows], weights.embed_VH)
        for number, layer in enumerate(weights.layers):
            q_BND, k_BKD, v_BKD = self._project(x_BH, layer, rope)
            keys_BCKD, values_BCKD = slots.cache.keys_LSCKD[number], slots.cache.values_LSCKD[number]
            keys_BCKD[rows_B, positions_B] = k_BKD
            values_BCKD[rows_B, positions_B] = v_BKD
            # Heads that share keys stand in for query positions, so no key is copied.
            mixed_BKGD = F.scaled_dot_product_attention(
                q_BND.view(num_rows, shape.num_kv_heads, -1, shape.head_dim),
                keys_BCKD[:num_rows, :context].transpose(1, 2),
                values_BCKD[:num_rows, :context].transpose(1, 2),
                attn_mask=mask_B11C,
            )
            x_BH = x_BH + F.linear(mixed_BKGD.reshape(num_rows, -1), layer.o_HQ)
            gate_BF, up_BF = F.linear(_norm(x_BH, layer.post_norm_H, shape.norm_eps), layer.gate_up_FH).chunk(
                2, -1
            )
            x_BH = x_BH + F.linear(F.silu(gate_BF) * up_BF, layer.down_HF)
        hidden_BH = _norm(x_BH, weights.norm_H, shape.norm_eps)
        slots.states_SNH[rows_B, slots.counts_S[:num_rows] - 1] = hidden_BH.to(torch.bfloat16)
        self._draw(F.linear(hidden_BH, weights.head_VH), rows_B)

    def take_over(self, old: "CpuStep") -> None:
        """Go on for a step whose slots were too small. Nothing to do: the slots have all there is."""

    def compute(self, prompts: Sequence[Prompt]) -> list[Batch]:
        """Prompts for rows to start from, in batches of about one length: a CPU pays for every token of padding."""
        return [prefill(self._decoder, batch) for batch in length_batches(prompts, 1.25)]

    def enter(self, admitted: Mapping[int, Request]) -> None:
        self._slots.enter(admitted, [0] * len(admitted))

    def start(self, batch: Batch, places_R: Tensor, slots_R: Tensor) -> None:
        """Rows in `slots_R` begin after the batch's prompts at `places_R`: their first tokens are drawn."""
        assert batch.cache is not None
        self._slots.cache.copy_from(
            batch.cache, source_slots=places_R, slots=slots_R, context=batch.cache.max_context
        )
        self._draw(batch.logits_PV[places_R], slots_R)

    def leave(self, requests: Iterable[Request]) -> None:
        """Rows have ended. Nothing to do: their prompts were their own."""

    def _project(
        self, x_BH: Tensor, layer: FusedLayer, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        shape = self._weights.shape
        normed_BH = _norm(x_BH, layer.input_norm_H, shape.norm_eps)
        qkv_BQD = F.linear(normed_BH, layer.qkv_QH, layer.qkv_bias_Q).view(len(x_BH), -1, shape.head_dim)
        first_v = shape.num_heads + shape.num_kv_heads
        qk_BMD, v_BKD = qkv_BQD[:, :first_v], qkv_BQD[:, first_v:]
        if layer.q_norm_D is not None and layer.k_norm_D is not None:
            q_BND = _norm(qk_BMD[:, : shape.num_heads], layer.q_norm_D, shape.norm_eps)
            k_BKD = _norm(qk_BMD[:, shape.num_heads :], layer.k_norm_D, shape.norm_eps)
            qk_BMD = torch.cat((q_BND, k_BKD), dim=1)
        cos, signed_sin = rope
        turned_BMD = torch.addcmul(qk_BMD * cos, qk_BMD.roll(shape.head_dim // 2, -1), signed_sin)
        return turned_BMD[:, : shape.num_heads], turned_BMD[:, shape.num_heads :], v_BKD

    def _draw(self, logits_RV: Tensor, slots_R: Tensor) -> None:
        slots = self._slots
        counts_R = slots.counts_S[slots_R]
        tokens_R, logprobs_R = draw_tokens(
            logits_RV, slots.temperatures_S[slots_R].float(), slots.uniforms_SN[slots_R, counts_R]
        )
        slots.tokens_SN[slots_R, counts_R] = tokens_R
        slots.logprobs_SN[slots_R, counts_R] = logprobs_R
        slots.newest_S[slots_R] = tokens_R
        counts_R = counts_R + 1
        slots.counts_S[slots_R] = counts_R
        slots.positions_S[slots_R] += 1
        ends_R = self._is_end_V[tokens_R] | (counts_R >= slots.caps_S[slots_R])
        slots.ended_S[slots_R] = torch.where(ends_R, counts_R, 0)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype is torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()  # rounded where the decoder rounds
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
