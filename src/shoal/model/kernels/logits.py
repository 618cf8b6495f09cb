# mypy: disable-error-code="untyped-decorator,misc,no-untyped-def,no-untyped-call,import-not-found,import-untyped,index,unused-ignore"
"""Triton kernels over rows of logits. Imported on CUDA machines only.

    reduce_rows, gradient_rows   log-probs and entropies, and their gradient; the plain torch version is in model/logprobs.py
    token_intervals              where drawn tokens lie in their distributions, for validators
    draw                         draws a token per row as docs/wire/draw.md says, stores it, and updates the row's position and end

token_intervals counts in powers of two from a reference, the drawn token's own logit: it is near the largest, and known before
the first block is read. Each lane sums for itself, and lanes are combined at the end, so the kernel waits only for memory.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOGPROB_BLOCK = 4096
INTERVAL_BLOCK, INTERVAL_WARPS = 1024, 8
INTERVAL_NEAR = 24.0
"""Maximum distance, in powers of two, of the largest logit from the reference. Beyond it sums of squares would lose digits, and the
row is read again with the largest as its reference. Honest draws are almost never that unlikely."""
DRAW_BLOCK = 2048
"""Vocabulary entries that are summed together; the draw then searches one such block."""


@triton.jit
def _reduce_row(
    logits_ptr,
    targets_ptr,
    logprobs_ptr,
    lse_ptr,
    entropy_ptr,
    vocab,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits_ptr + row * vocab
    largest = -1e30  # not -inf: 0 * inf is NaN
    total = 0.0
    # Sum of e^(z - largest) (z - largest): with z instead of the difference, digits would cancel in the entropy.
    weighted = 0.0
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < vocab
        z = tl.load(start + columns, mask=inside, other=float("-inf")).to(tl.float32) * inverse_temperature
        new_largest = tl.maximum(largest, tl.max(z, 0))
        shrink = tl.exp(largest - new_largest)
        e = tl.exp(z - new_largest)
        weighted = (weighted + total * (largest - new_largest)) * shrink
        weighted += tl.sum(tl.where(inside, e * (z - new_largest), 0.0), 0)
        total = total * shrink + tl.sum(e, 0)
        largest = new_largest
    lse = largest + tl.log(total)
    target = tl.load(targets_ptr + row)
    tl.store(logprobs_ptr + row, tl.load(start + target).to(tl.float32) * inverse_temperature - lse)
    tl.store(lse_ptr + row, lse)
    tl.store(entropy_ptr + row, tl.log(total) - weighted / total)


@triton.jit
def _gradient_row(
    logits_ptr,
    targets_ptr,
    lse_ptr,
    entropy_ptr,
    of_logprob_ptr,
    of_entropy_ptr,
    vocab,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits_ptr + row * vocab
    target = tl.load(targets_ptr + row)
    lse, entropy = tl.load(lse_ptr + row), tl.load(entropy_ptr + row)
    of_logprob, of_entropy = tl.load(of_logprob_ptr + row), tl.load(of_entropy_ptr + row)
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < vocab
        z = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
        logp = z - lse
        p = tl.exp(logp)
        hit = tl.where(columns == target, 1.0, 0.0)
        d = (of_logprob * (hit - p) - of_entropy * p * (logp + entropy)) * inverse_temperature
        tl.store(start + columns, d.to(logits_ptr.dtype.element_ty), mask=inside)


def reduce_rows(logits_NV: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-prob of the target, log-sum-exp and entropy of each row of logits / temperature, float32."""
    logits_NV = logits_NV.contiguous()
    rows, vocab = logits_NV.shape
    logprobs_N, lse_N, entropy_N = torch.empty(3, rows, device=logits_NV.device, dtype=torch.float32)
    _reduce_row[(rows,)](
        logits_NV,
        targets_N,
        logprobs_N,
        lse_N,
        entropy_N,
        vocab,
        1 / temperature,
        BLOCK=LOGPROB_BLOCK,
        num_warps=8,
    )
    return logprobs_N, lse_N, entropy_N


def gradient_rows(
    logits_NV: Tensor,
    targets_N: Tensor,
    reduced: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor],
    temperature: float,
) -> Tensor:
    """Overwrites the logits with their gradient and returns it.

    `reduced`: log-sum-exp and entropy; `gradients`: those to log-prob and entropy.
    """
    assert logits_NV.is_contiguous(), "logits must be contiguous: the gradient is written in place"
    rows, vocab = logits_NV.shape
    _gradient_row[(rows,)](
        logits_NV, targets_N, *reduced, *gradients, vocab, 1 / temperature, BLOCK=LOGPROB_BLOCK, num_warps=8
    )
    return logits_NV


@triton.jit
def _add_interval_block(
    sums, start, first, vocab, scale, reference, MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    """Adds a block to the sums of each lane: 2^d, d 2^d, d d 2^d, and the largest d. Also returns its 2^d."""
    total, first_moment, second_moment, largest = sums
    columns = first + tl.arange(0, BLOCK)
    if MASKED:
        z = tl.load(start + columns, mask=columns < vocab, other=0.0).to(tl.float32)
        d = tl.where(columns < vocab, z * scale - reference, -1e30)
    else:
        d = tl.load(start + columns).to(tl.float32) * scale - reference
    e = tl.exp2(d)
    ed = e * d  # multiplied by d again below: d * d may be infinite past the end of the vocabulary
    return (total + e, first_moment + ed, second_moment + ed * d, tl.maximum(largest, d)), e


@triton.jit
def _interval_sums(start, token, vocab, scale, reference, BLOCK: tl.constexpr):
    """Returns a row's three sums, the sum of 2^d of tokens with smaller ids, and the largest d."""
    home = token // BLOCK * BLOCK
    whole = vocab // BLOCK * BLOCK
    zeros = tl.zeros((BLOCK,), tl.float32)
    sums = (zeros, zeros, zeros, zeros - 1e30)
    for first in range(0, home, BLOCK):
        sums, _ = _add_interval_block(sums, start, first, vocab, scale, reference, False, BLOCK)
    below = sums[0]
    sums, e = _add_interval_block(sums, start, home, vocab, scale, reference, True, BLOCK)
    below += tl.where(home + tl.arange(0, BLOCK) < token, e, 0.0)
    for first in range(home + BLOCK, whole, BLOCK):
        sums, _ = _add_interval_block(sums, start, first, vocab, scale, reference, False, BLOCK)
    if home < whole and whole < vocab:
        sums, _ = _add_interval_block(sums, start, whole, vocab, scale, reference, True, BLOCK)
    total, first_moment, second_moment, largest = sums
    return (
        tl.sum(total, 0),
        tl.sum(first_moment, 0),
        tl.sum(second_moment, 0),
        tl.sum(below, 0),
        tl.max(largest, 0),
    )


@triton.jit
def _interval_row(logits, tokens, out, num_rows, vocab, scale, NEAR: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * vocab
    token = tl.load(tokens + row).to(tl.int32)
    own = tl.load(start + token).to(tl.float32) * scale
    reference = own
    total, first_moment, second_moment, below, largest = _interval_sums(
        start, token, vocab, scale, reference, BLOCK
    )
    if largest > NEAR:
        reference += largest
        total, first_moment, second_moment, below, largest = _interval_sums(
            start, token, vocab, scale, reference, BLOCK
        )
    low, mean, log2_total = below / total, first_moment / total, tl.log2(total)
    ln2: tl.constexpr = 0.6931471805599453
    logprob = (own - reference - log2_total) * ln2
    tl.store(out + row, logprob)
    tl.store(out + num_rows + row, low)
    tl.store(out + 2 * num_rows + row, low + tl.exp(logprob))
    tl.store(out + 3 * num_rows + row, (log2_total - mean) * ln2)
    variance = tl.maximum(second_moment / total - mean * mean, 0.0)
    tl.store(out + 4 * num_rows + row, variance * (ln2 * ln2))


def token_intervals(logits_NV: Tensor, tokens_N: Tensor, temperature: float) -> Tensor:
    """Returns [5, N] float32: log-prob of each token, both ends of its interval, entropy, and variance of -log p.

    The plain torch version is in swarm/validator/recompute.py.
    """
    logits_NV = logits_NV.contiguous()
    num_rows, vocab = logits_NV.shape
    out_5N = torch.empty(5, num_rows, device=logits_NV.device, dtype=torch.float32)
    scale = math.log2(math.e) / temperature
    _interval_row[(num_rows,)](
        logits_NV,
        tokens_N,
        out_5N,
        num_rows,
        vocab,
        scale,
        NEAR=INTERVAL_NEAR,
        BLOCK=INTERVAL_BLOCK,
        num_warps=INTERVAL_WARPS,
    )
    return out_5N


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
    # A block of only -inf has weight 0; -inf - -inf would be NaN.
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
        # Rounding may put the point just after the block's last weight: then the last token is drawn.
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
    """Draws a token for the row in slot `slots_R[i]` from row `sources_R[i]` of the logits, and advances the slot by one token.

    Temperatures and uniforms are float64 with the same stride. `table_6S` is that of decode_attention.RowTables.
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
