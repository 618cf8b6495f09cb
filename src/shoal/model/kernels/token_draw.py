# mypy: disable-error-code="untyped-decorator,misc,no-untyped-def,no-untyped-call,import-not-found,import-untyped,index,unused-ignore"
"""Triton kernels that end a decode step: a token for each row as docs/wire/draw.md has it, and all that follows from it:
where it is kept, the row's next position, whether the row has ended. Imported on CUDA machines only.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

DRAW_BLOCK = 2048
"""Vocabulary entries summed together; the draw then looks into one such block."""


@triton.jit
def _block_sums(
    logits,
    sources,
    slots,
    temperatures,
    tops,
    sums,
    term_stride,
    V: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    source = tl.load(sources + row)
    temperature = tl.load(temperatures + tl.load(slots + row) * term_stride).to(tl.float32)
    v = block * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + source * V + v, mask=v < V, other=float("-inf")).to(tl.float32) / temperature
    top = tl.max(z, axis=0)
    # A block of -inf alone weighs nothing; -inf - -inf would be NaN.
    shift = tl.where(top == float("-inf"), 0.0, top)
    tl.store(tops + row * NUM_BLOCKS + block, top)
    tl.store(sums + row * NUM_BLOCKS + block, tl.sum(tl.exp(z - shift).to(tl.float64), axis=0))


@triton.jit
def _draw(
    logits,
    sources,
    slots,
    temperatures,
    tops,
    sums,
    uniforms,
    table,
    newest,
    tokens,
    logprobs,
    is_end,
    num_slots,
    new_tokens,
    term_stride,
    V: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(sources + row)
    slot = tl.load(slots + row)
    position = tl.load(table + slot)
    count = tl.load(table + num_slots + slot)
    cap = tl.load(table + 2 * num_slots + slot)
    ended = tl.load(table + 3 * num_slots + slot)
    if ended == 0:
        temperature = tl.load(temperatures + slot * term_stride).to(tl.float32)
        b = tl.arange(0, BLOCKS)
        in_b = b < NUM_BLOCKS
        top_b = tl.load(tops + row * NUM_BLOCKS + b, mask=in_b, other=float("-inf"))
        top = tl.max(top_b, axis=0)
        weight_b = tl.load(sums + row * NUM_BLOCKS + b, mask=in_b, other=0.0) * tl.exp(top_b - top).to(
            tl.float64
        )
        total = tl.sum(weight_b, axis=0)
        point = tl.load(uniforms + slot * term_stride + count) * total
        reached_b = tl.cumsum(weight_b, axis=0)
        last_b = tl.max(tl.where(weight_b > 0, b, 0), axis=0)
        block = tl.minimum(tl.sum((reached_b <= point).to(tl.int32), axis=0), last_b)
        before = tl.sum(tl.where(b < block, weight_b, 0.0), axis=0)

        i = tl.arange(0, BLOCK)
        v = block * BLOCK + i
        z = tl.load(logits + source * V + v, mask=v < V, other=float("-inf")).to(tl.float32) / temperature
        weight = tl.exp(z - top).to(tl.float64)
        reached = before + tl.cumsum(weight, axis=0)
        # Rounding may leave the point just behind the block's last weight: then it is that one's.
        last = tl.max(tl.where(weight > 0, i, 0), axis=0)
        within = tl.minimum(tl.sum((reached <= point).to(tl.int32), axis=0), last)
        token = (block * BLOCK + within).to(tl.int64)
        chosen = tl.sum(tl.where(i == within, z, 0.0), axis=0)
        logprob = (chosen - top).to(tl.float64) - tl.log(total)

        tl.store(tokens + slot * new_tokens + count, token)
        tl.store(logprobs + slot * new_tokens + count, logprob.to(tl.float32))
        tl.store(newest + slot, token)
        count += 1
        ends = (tl.load(is_end + token) != 0) | (count >= cap)
        tl.store(table + slot, tl.where(ends, 0, position + 1))
        tl.store(table + num_slots + slot, count)
        tl.store(table + 3 * num_slots + slot, tl.where(ends, count, 0))


def draw(
    logits_BV: Tensor,
    *,
    sources_R: Tensor,
    slots_R: Tensor,
    temperatures_S: Tensor,
    uniforms_SN: Tensor,
    table_6S: Tensor,
    newest_S: Tensor,
    tokens_SN: Tensor,
    logprobs_SN: Tensor,
    is_end_V: Tensor,
) -> None:
    """Draw for the row in slot `slots_R[i]` from the logits in line `sources_R[i]`, and take the row one token on.

    Temperatures and uniforms are float64 with one stride. `table_6S` has a line each of positions, counts, caps, ends, and what `attend` reads.
    """
    num_rows, vocab = len(slots_R), logits_BV.shape[1]
    num_blocks = triton.cdiv(vocab, DRAW_BLOCK)
    tops = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits_BV.device)
    sums = torch.empty(num_rows, num_blocks, dtype=torch.float64, device=logits_BV.device)
    _block_sums[(num_rows, num_blocks)](
        logits_BV,
        sources_R,
        slots_R,
        temperatures_S,
        tops,
        sums,
        uniforms_SN.stride(0),
        V=vocab,
        NUM_BLOCKS=num_blocks,
        BLOCK=DRAW_BLOCK,
        num_warps=8,
    )
    _draw[(num_rows,)](
        logits_BV,
        sources_R,
        slots_R,
        temperatures_S,
        tops,
        sums,
        uniforms_SN,
        table_6S,
        newest_S,
        tokens_SN,
        logprobs_SN,
        is_end_V,
        table_6S.shape[1],
        tokens_SN.shape[1],
        uniforms_SN.stride(0),
        V=vocab,
        NUM_BLOCKS=num_blocks,
        BLOCKS=triton.next_power_of_2(num_blocks),
        BLOCK=DRAW_BLOCK,
        num_warps=8,
    )
