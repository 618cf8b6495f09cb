"""One decode step on a CPU: one token for every row, or the tokens of a draft.

    CpuStep.decode ──▶ one thread per core, each with its share of the rows ──▶ run_layers ──▶ draw_tokens

Attention has two parts under one softmax. Prompts are stored apart, once for all their rows, whose queries meet them in
one product; the new tokens of each row are in its slot. Keys and values are float32 whatever the model's dtype: short
products are faster in float32, and scores keep their precision.

A row's results do not depend on the other rows, bit for bit: sizes that would make a library choose another order of sums are
padded (MIN_QUERIES, ALIGNED, `linear`), and sums over new tokens have steps of OWN_SUM.

B rows of one thread, T tokens fed to each at once, U = B * T; otherwise the letters of kv_slots.py and model/decoder.py.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.model.decoder import Decoder
from shoal.model.fused import FusedLayer, FusedWeights, linear
from shoal.rollout.engine.block_pool import PlacedPrompts, Prompt, PromptPlaces
from shoal.rollout.engine.cpu_threads import MIN_ROWS, CoreThreads, divide, split_rows
from shoal.rollout.engine.kv_slots import Draws, KVSlots
from shoal.rollout.engine.prompt_cache import (
    FinishedPrefill,
    PromptBatch,
    batch_by_length,
    prefill,
    split_prompts,
)
from shoal.rollout.engine.sampling import draw_tokens
from shoal.rollout.engine.scheduler import Admission

MIN_QUERIES = 4
"""Products of fewer queries with keys or values sum in another order."""
ALIGNED = 16
"""Prompts and new tokens begin at a multiple of this in a row of scores, so that each score meets the same lane of a vector; shorter
products sum in another order."""
OWN_SUM = 128
"""New tokens whose values are summed by one product. A longer product divides its sum by the length of the longest row."""


class CpuStep:
    """Steps the rows in slots 0 .. num_rows-1, all of which must be running."""

    gapless = True
    """Every slot up to the last costs time, so gaps between rows must be closed."""
    lookahead = 0
    """The result of a step is known when it returns."""

    def __init__(
        self, decoder: Decoder, weights: FusedWeights, slots: KVSlots, is_end_V: Tensor, threads: CoreThreads
    ) -> None:
        """`weights` are the decoder's own, packed or not."""
        assert slots.rows_cache is not None, "CpuStep reads keys and values from the rows' own addresses"
        self._cache = slots.rows_cache
        self._decoder, self._weights, self.slots, self._is_end_V = decoder, weights, slots, is_end_V
        self._threads = threads
        self._run_layers = scripted_layers()  # in this thread: TorchScript's compiler is not thread-safe
        self._prompts: dict[int, _PromptKV] = {}
        """Keys and values of the stored prompts, by their place."""
        self._shares: list[_RowShare] = []
        """Rows of each thread; empty after rows were added or removed."""

    def wants_compact(self, num_running: int, end: int) -> bool:
        """Returns whether the running rows, in slots below `end`, have gaps."""
        return num_running < end

    def move_rows(self, moves: Sequence[tuple[int, int]]) -> None:
        self.slots.move(moves)

    def copy_from(self, old: "CpuStep") -> None:
        """Takes over the rows and prompts of a step with smaller slots."""
        self.slots.copy_from(old.slots)
        self._prompts = old._prompts

    def prefill(
        self, prompts: Sequence[Prompt], placed: PlacedPrompts, places: PromptPlaces
    ) -> FinishedPrefill:
        """Computes prompts for rows to start from, in batches of similar length: a CPU pays for every token of padding."""
        self.forget_prompts(placed.freed)
        groups = split_prompts(batch_by_length(prompts), self._threads.num)
        batches = self._threads.run([partial(prefill, self._decoder, group) for group in groups])
        for batch in batches:
            assert batch.cache is not None
            for line, prompt in enumerate(batch.prompts):
                if prompt in placed.added:
                    sides = (batch.cache.keys_LSCKD, batch.cache.values_LSCKD)
                    kept = [side[:, line, : len(prompt)].transpose(1, 2) for side in sides]
                    missing = max(0, ALIGNED - len(prompt))
                    self._prompts[placed.added[prompt]] = _PromptKV(
                        len(prompt), *(F.pad(side.float(), (0, 0, 0, missing)).contiguous() for side in kept)
                    )
        return FinishedPrefill(prompts, [batch._replace(cache=None) for batch in batches])

    def forget_prompts(self, places: Iterable[int]) -> None:
        """Frees the memory of evicted prompts."""
        for place in places:
            self._prompts.pop(place, None)

    def start_rows(self, admitted: Sequence[Admission]) -> None:
        self.slots.start_rows(admitted)
        self._shares = []

    def draw_first_tokens(self, batch: PromptBatch, lines_R: Tensor, slots_R: Tensor) -> None:
        """Draws the first tokens of the rows in `slots_R`, from lines `lines_R` of the batch's logits."""
        self._draw(batch.logits_PV[lines_R], slots_R)

    def remove_rows(self, slots: Sequence[int]) -> None:
        """Forgets how rows are shared among threads: other rows will move into these slots."""
        self._shares = []
        self._cache.release(slots)

    def preempt_row(self, slot: int) -> None:
        self.slots.stop_rows([slot])
        self.remove_rows([slot])

    def decode(self, num_rows: int) -> None:
        """Feeds every row its newest token and draws the next."""
        if not self._shares:
            self._shares = [self._share(rows) for rows in split_rows(num_rows, self._threads.num)]
        self._threads.run([partial(self._decode, share) for share in self._shares])

    def verify(self, slots: Sequence[int], drafts_RT: npt.NDArray[np.int64]) -> None:
        """Feeds every row its newest token and a draft, and keeps the draws up to the first that differs from the draft.

        `drafts_RT` has a line for each of `slots`, which are all running rows in order; -1 where a draft has no more tokens.
        """
        assert list(slots) == list(range(len(slots)))
        num = max(1, min(self._threads.num, len(slots), drafts_RT.size // MIN_ROWS))
        shares = [self._share(rows) for rows in divide(len(slots), num)]
        self._threads.run([partial(self._verify, share, torch.from_numpy(drafts_RT)) for share in shares])

    def _decode(self, share: "_RowShare") -> None:
        slots, rows = self.slots, slice(share.start, share.stop)
        hidden_BH = self._run(share, slots.newest_S[rows, None])
        lines_B = (slots.num_drawn_S[rows] - 1) % slots.states_SAH.shape[1]
        slots.states_SAH[slots.index_S[rows], lines_B] = hidden_BH.to(torch.bfloat16)
        self._draw(linear(hidden_BH, self._weights.head_VH), slots.index_S[rows])

    def _verify(self, share: "_RowShare", drafts_RT: Tensor) -> None:
        slots, rows = self.slots, slice(share.start, share.stop)
        fed_BT = torch.cat((slots.newest_S[rows, None], drafts_RT[rows]), dim=1)
        hidden_UH = self._run(share, fed_BT)
        slots_B = slots.index_S[rows]
        uniforms_BT = slots.next_uniforms(slots_B, fed_BT.shape[1])
        temperatures_U = slots.temperatures_S[rows].repeat_interleave(fed_BT.shape[1])
        tokens_U, logprobs_U = draw_tokens(
            linear(hidden_UH, self._weights.head_VH), temperatures_U, uniforms_BT.flatten()
        )
        size = fed_BT.shape
        draws = Draws(tokens_U.view(size), logprobs_U.view(size), hidden_UH.view(*size, -1))
        slots.keep_draws(slots_B, fed_BT, draws, self._is_end_V)

    def _run(self, share: "_RowShare", fed_BT: Tensor) -> Tensor:
        """Feeds tokens to each row and returns their states, [U, H]."""
        weights = self._weights
        shape = weights.shape
        heads = Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.norm_eps)
        x_UH = F.embedding(fed_BT.flatten().clamp(min=0), weights.embed_VH)
        inputs = self._step_inputs(share, fed_BT.shape[1])
        x_UH = self._run_layers(x_UH, list(weights.layers), heads, share.prompts, inputs)
        return norm(x_UH, weights.norm_H, shape.norm_eps)

    def _draw(self, logits_RV: Tensor, slots_R: Tensor) -> None:
        slots = self.slots
        num_drawn_R = slots.num_drawn_S[slots_R]
        tokens_R, logprobs_R = draw_tokens(
            logits_RV, slots.temperatures_S[slots_R], slots.uniforms_SN[slots_R, num_drawn_R]
        )
        slots.tokens_SN[slots_R, num_drawn_R] = tokens_R
        slots.logprobs_SN[slots_R, num_drawn_R] = logprobs_R
        slots.newest_S[slots_R] = tokens_R
        num_drawn_R = num_drawn_R + 1
        slots.num_drawn_S[slots_R] = num_drawn_R
        slots.positions_S[slots_R] += 1
        ends_R = self._is_end_V[tokens_R] | (num_drawn_R >= slots.max_drawn_S[slots_R])
        slots.ended_S[slots_R] = torch.where(ends_R, num_drawn_R, 0)

    def _step_inputs(self, share: "_RowShare", num_fed: int) -> "StepInputs":
        slots, shape, rows = self.slots, self._weights.shape, slice(share.start, share.stop)
        num_rows, index_T = share.stop - share.start, slots.index_C[:num_fed]
        positions_BT = slots.positions_S[rows, None] + index_T
        # No answer reaches the last position, so draft tokens beyond the row's last draw may be stored there.
        own_BT = (positions_BT - slots.prompt_lengths_S[rows, None]).clamp(max=slots.size.row_positions - 1)
        num_own = min(_aligned(int(own_BT.max()) + 1), slots.size.row_positions)
        rope_U1E = self._weights.rope_PE[positions_BT.flatten().clamp(max=shape.max_positions - 1)][:, None]
        queries = num_rows * num_fed * (shape.num_heads // shape.num_kv_heads)
        columns = share.prompts.longest + num_own
        return StepInputs(
            cos_U1D=rope_U1E[..., : shape.head_dim],
            signed_sin_U1D=rope_U1E[..., shape.head_dim :],
            num_fed=num_fed,
            rows_U=slots.index_S[:num_rows].repeat_interleave(num_fed)
            if num_fed > 1
            else slots.index_S[:num_rows],
            own_U=own_BT.flatten(),
            num_own=num_own,
            beyond_BTN=slots.index_C[:num_own] > own_BT[:, :, None],
            scores_KRC=torch.full((shape.num_kv_heads, queries, columns), float("-inf")),
            keys_LBCKD=self._cache.keys_LSCKD[:, rows],
            values_LBCKD=self._cache.values_LSCKD[:, rows],
        )

    def _share(self, rows: range) -> "_RowShare":
        places_B = self.slots.prompt_places_S[rows.start : rows.stop]
        order_B = places_B.argsort(stable=True)
        places, counts = places_B[order_B].unique_consecutive(return_counts=True)
        prompts = [self._prompts[place] for place in places.tolist()]
        stops = counts.cumsum(0)
        shared = SharedPrompts(
            starts=(stops - counts).tolist(),
            stops=stops.tolist(),
            lengths=[prompt.length for prompt in prompts],
            keys_LKCD=[prompt.keys_LKCD for prompt in prompts],
            values_LKCD=[prompt.values_LKCD for prompt in prompts],
            longest=_aligned(max(prompt.keys_LKCD.shape[2] for prompt in prompts)),
            order_B=order_B,
            ranks_B=order_B.argsort(),
        )
        return _RowShare(rows.start, rows.stop, shared)


class _PromptKV(NamedTuple):
    """Keys and values of one prompt, padded to ALIGNED positions if it is shorter."""

    length: int
    keys_LKCD: Tensor
    values_LKCD: Tensor


class _RowShare(NamedTuple):
    """The rows of one thread: slots `start` to `stop`."""

    start: int
    stop: int
    prompts: "SharedPrompts"


def _aligned(num: int) -> int:
    return -(-num // ALIGNED) * ALIGNED


# -- the layers, written so that TorchScript can run them --------------------------------------------------


class SharedPrompts(NamedTuple):
    """The prompts of one thread's rows.

    Rows `starts[i]` to `stops[i]`, sorted by prompt, have prompt i.
    """

    starts: list[int]
    stops: list[int]
    lengths: list[int]
    keys_LKCD: list[Tensor]
    values_LKCD: list[Tensor]
    longest: int
    order_B: Tensor
    """The rows sorted by prompt."""
    ranks_B: Tensor
    """Position of each row in that order."""


class StepInputs(NamedTuple):
    """Inputs that all layers of a step share."""

    cos_U1D: Tensor
    signed_sin_U1D: Tensor
    num_fed: int
    """T."""
    rows_U: Tensor
    """Row of each token, 0 .. B-1."""
    own_U: Tensor
    """Index of each token among its row's new tokens."""
    num_own: int
    beyond_BTN: Tensor
    """True for new-token positions after the token."""
    scores_KRC: Tensor
    """Buffer for the scores of all queries of a kv head over the prompt and, from `longest` on, the new tokens."""
    keys_LBCKD: Tensor
    """Keys of the rows' new tokens."""
    values_LBCKD: Tensor


class Heads(NamedTuple):
    """Attention settings of the model."""

    num: int
    num_kv: int
    dim: int
    eps: float


def run_layers(
    x_UH: Tensor, layers: list[FusedLayer], heads: Heads, prompts: SharedPrompts, inputs: StepInputs
) -> Tensor:
    """Runs all layers and stores the new keys and values."""
    for number, layer in enumerate(layers):
        qkv_UQD = _project(norm(x_UH, layer.input_norm_H, heads.eps), layer, heads, inputs)
        mixed_UQ = _attend(qkv_UQD, number, heads, prompts, inputs).to(x_UH.dtype)
        x_UH = x_UH + linear(mixed_UQ, layer.o_HQ)
        gate_up_UF = linear(norm(x_UH, layer.post_norm_H, heads.eps), layer.gate_up_FH)
        gate_UF, up_UF = gate_up_UF.chunk(2, -1)
        x_UH = x_UH + linear(F.silu(gate_UF).mul_(up_UF), layer.down_HF)
    return x_UH


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()  # rounds where the decoder rounds
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _project(normed_UH: Tensor, layer: FusedLayer, heads: Heads, inputs: StepInputs) -> Tensor:
    """Returns rotated queries and keys, and values, as float32 [U, heads + 2 kv heads, D]."""
    qkv_UQD = linear(normed_UH, layer.qkv_QH, layer.qkv_bias_Q).view(len(normed_UH), -1, heads.dim)
    first_v = heads.num + heads.num_kv
    qk_UMD = qkv_UQD[:, :first_v]
    q_norm_D, k_norm_D = layer.q_norm_D, layer.k_norm_D
    if q_norm_D is not None and k_norm_D is not None:
        q_UND = norm(qk_UMD[:, : heads.num], q_norm_D, heads.eps)
        k_UKD = norm(qk_UMD[:, heads.num :], k_norm_D, heads.eps)
        qk_UMD = torch.cat((q_UND, k_UKD), dim=1)
    rotated_UMD = torch.addcmul(
        qk_UMD * inputs.cos_U1D, qk_UMD.roll(heads.dim // 2, -1), inputs.signed_sin_U1D
    )
    qkv_UQD[:, :first_v] = rotated_UMD
    return qkv_UQD.float()


def _attend(qkv_UQD: Tensor, number: int, heads: Heads, prompts: SharedPrompts, inputs: StepInputs) -> Tensor:
    """Stores the new keys and values and returns the attention output, float32 [U, heads * D]."""
    kv_heads, num_fed, num_own = heads.num_kv, inputs.num_fed, inputs.num_own
    num_rows, num_queries = len(qkv_UQD) // num_fed, num_fed * (heads.num // kv_heads)
    keys_BCKD, values_BCKD = inputs.keys_LBCKD[number], inputs.values_LBCKD[number]
    first_v = heads.num + kv_heads
    keys_BCKD[inputs.rows_U, inputs.own_U] = qkv_UQD[:, heads.num : first_v]
    values_BCKD[inputs.rows_U, inputs.own_U] = qkv_UQD[:, first_v:]
    # Heads that share keys, and tokens fed together, take the place of query positions, so that no key is copied.
    q_BTKGD = (qkv_UQD[:, : heads.num] * heads.dim**-0.5).view(num_rows, num_fed, kv_heads, -1, heads.dim)
    q_BKQD = q_BTKGD.transpose(1, 2).reshape(num_rows, kv_heads, num_queries, heads.dim)
    q_KRD = q_BKQD[prompts.order_B].transpose(0, 1).reshape(kv_heads, -1, heads.dim)
    scores_KRC = inputs.scores_KRC
    for at, start in enumerate(prompts.starts):
        keys_KDC = prompts.keys_LKCD[at][number].transpose(1, 2)
        first, last = start * num_queries, prompts.stops[at] * num_queries
        scores_KRC[:, first:last, : keys_KDC.shape[2]] = _product(q_KRD[:, first:last], keys_KDC)
        if prompts.lengths[at] < keys_KDC.shape[2]:
            scores_KRC[:, first:last, prompts.lengths[at] : keys_KDC.shape[2]] = float("-inf")
    own_keys = keys_BCKD[:, :num_own].transpose(1, 2).flatten(0, 1)
    own_values = values_BCKD[:, :num_own].transpose(1, 2).flatten(0, 1)
    own_scores = _product(q_BKQD.flatten(0, 1), own_keys.transpose(1, 2))
    own_BKTGN = own_scores.view(num_rows, kv_heads, num_fed, -1, num_own)
    own_BKTGN.masked_fill_(inputs.beyond_BTN[:, None, :, None], float("-inf"))
    by_row = [kv_heads, num_rows, num_queries, -1]
    own_BKQN = own_BKTGN.view(num_rows, kv_heads, num_queries, num_own)
    scores_KRC.view(by_row)[:, :, :, prompts.longest :] = own_BKQN[prompts.order_B].transpose(0, 1)
    weights_KRC = scores_KRC.softmax(-1)
    mixed_KRD = torch.empty_like(q_KRD)
    for at, start in enumerate(prompts.starts):
        values_KCD = prompts.values_LKCD[at][number]
        first, last = start * num_queries, prompts.stops[at] * num_queries
        mixed_KRD[:, first:last] = _product(weights_KRC[:, first:last, : values_KCD.shape[1]], values_KCD)
    own_weights = weights_KRC.view(by_row)[:, :, :, prompts.longest :].transpose(0, 1)[prompts.ranks_B]
    from_prompts = mixed_KRD.view(by_row).transpose(0, 1)[prompts.ranks_B]
    own = _mix_own(own_weights.flatten(0, 1), own_values)
    mixed_BKQD = own.view(num_rows, kv_heads, num_queries, heads.dim) + from_prompts
    by_token = mixed_BKQD.view(num_rows, kv_heads, num_fed, -1, heads.dim).transpose(1, 2)
    return by_token.reshape(len(qkv_UQD), -1)


def _product(left: Tensor, right: Tensor, least: int = MIN_QUERIES) -> Tensor:
    """Computes torch.bmm, always in the order of sums of many matrices and queries.

    A single matrix would be divided among threads, also if there is an `out` that is not contiguous.
    """
    num, lines = left.shape[0], left.shape[1]
    if lines < least:
        left = F.pad(left, [0, 0, 0, least - lines])
    if num == 1:
        left, right = left.expand(2, -1, -1), right.expand(2, -1, -1)
    return torch.bmm(left, right)[:num, :lines]


def _mix_own(weights: Tensor, values: Tensor, step: int = OWN_SUM) -> Tensor:
    """Returns the values of new tokens, weighted and summed in steps of OWN_SUM."""
    mixed = _product(weights[:, :, :step], values[:, :step])
    for start in range(step, values.shape[1], step):
        mixed = mixed + _product(weights[:, :, start : start + step], values[:, start : start + step])
    return mixed


@cache
def scripted_layers() -> Callable[[Tensor, list[FusedLayer], Heads, SharedPrompts, StepInputs], Tensor]:
    """Returns `run_layers` compiled by TorchScript, or the plain function where this torch has no TorchScript.

    As Python the threads would take turns at the interpreter lock, which they need after each of a thousand operations.
    """
    with warnings.catch_warnings():
        # TorchScript is deprecated. torch.compile, its successor, needs a C++ compiler on the machine.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return torch.jit.script(run_layers)
        except (AttributeError, RuntimeError):
            return run_layers
