"""One decode step on a CPU: one token for every row.

    CpuStep.decode ──▶ one thread per core, each with its share of the rows ──▶ run_layers ──▶ draw_tokens

Attention has two parts under one softmax. Prompts are stored apart, once for all their rows, whose queries meet them in
one product; the new tokens of each row are in its slot. Keys and values are float32 whatever the model's dtype: short
products are faster in float32, and scores keep their precision.

B rows of one thread, otherwise the letters of kv_slots.py and model/decoder.py.
"""

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.model.decoder import Decoder
from shoal.model.fused import FusedLayer, FusedWeights, linear
from shoal.rollout.engine.block_pool import PlacedPrompts, Prompt, PromptPlaces
from shoal.rollout.engine.kv_slots import KVSlots
from shoal.rollout.engine.prompt_cache import FinishedPrefill, PromptBatch, prefill
from shoal.rollout.engine.sampling import draw_tokens
from shoal.rollout.engine.scheduler import Admission

MIN_ROWS = 4
"""Rows that a thread has at least; with fewer rows, fewer threads are used."""
MIN_PROMPT_TOKENS = 64
"""Prompts with fewer tokens in total stay in one batch."""
MAX_PADDING = 1.25
"""A batch's longest prompt has at most this many times the tokens of its shortest, plus PADDING_TOKENS."""
PADDING_TOKENS = 16
START_S = 60.0
"""Seconds that threads may take to start."""
LARGEST_BLOCK_BYTES = 31 << 20
"""Just under glibc's largest M_MMAP_THRESHOLD (32 MiB)."""

T = TypeVar("T")


class CpuStep:
    """Steps the rows in slots 0 .. num_rows-1, all of which must be running."""

    gapless = True
    """Every slot up to the last costs time, so gaps between rows must be closed."""
    lookahead = 0
    """The result of a step is known when it returns."""

    def __init__(
        self,
        decoder: Decoder,
        weights: FusedWeights,
        slots: KVSlots,
        is_end_V: Tensor,
        threads: "CoreThreads",
    ) -> None:
        """`weights` are the decoder's own, packed or not."""
        assert slots.rows_cache is not None, "CpuStep reads keys and values from the rows' own addresses"
        self._cache = slots.rows_cache
        self._decoder, self._weights, self.slots, self._is_end_V = decoder, weights, slots, is_end_V
        self._threads = threads
        self._run_layers = scripted_layers()  # in this thread: TorchScript's compiler is not thread-safe
        self._prompts: dict[int, _PromptKV] = {}
        """By place."""
        self._shares: list[_RowShare] = []
        """Rows of each thread; empty after rows were added or removed."""

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
                    self._prompts[placed.added[prompt]] = _PromptKV(
                        *(side.to(torch.float32, memory_format=torch.contiguous_format) for side in kept)
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

    def _decode(self, share: "_RowShare") -> None:
        weights, slots = self._weights, self.slots
        shape, rows = weights.shape, slice(share.start, share.stop)
        heads = Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.norm_eps)
        x_BH = F.embedding(slots.newest_S[rows], weights.embed_VH)
        x_BH = self._run_layers(x_BH, list(weights.layers), heads, share.prompts, self._step_inputs(share))
        hidden_BH = norm(x_BH, weights.norm_H, shape.norm_eps)
        lines_B = (slots.num_drawn_S[rows] - 1) % slots.states_SAH.shape[1]
        slots.states_SAH[slots.index_S[rows], lines_B] = hidden_BH.to(torch.bfloat16)
        self._draw(linear(hidden_BH, weights.head_VH), slots.index_S[rows])

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

    def _step_inputs(self, share: "_RowShare") -> "StepInputs":
        slots, shape, rows = self.slots, self._weights.shape, slice(share.start, share.stop)
        positions_B = slots.positions_S[rows]
        own_B = positions_B - slots.prompt_lengths_S[rows]
        num_own = int(own_B.max()) + 1
        rope_B1E = self._weights.rope_PE[positions_B][:, None]
        queries = len(own_B) * (shape.num_heads // shape.num_kv_heads)
        columns = share.prompts.longest + num_own
        return StepInputs(
            cos_B1D=rope_B1E[..., : shape.head_dim],
            signed_sin_B1D=rope_B1E[..., shape.head_dim :],
            index_B=slots.index_S[: len(own_B)],
            own_B=own_B,
            num_own=num_own,
            beyond_BN=slots.index_C[:num_own] > own_B[:, None],
            scores_KRC=torch.full((shape.num_kv_heads, queries, columns), float("-inf")),
            keys_LBCKD=self._cache.keys_LSCKD[:, rows],
            values_LBCKD=self._cache.values_LSCKD[:, rows],
        )

    def _share(self, rows: range) -> "_RowShare":
        places_B = self.slots.prompt_places_S[rows.start : rows.stop]
        order_B = places_B.argsort(stable=True)
        places, counts = places_B[order_B].unique_consecutive(return_counts=True)
        group = self._weights.shape.num_heads // self._weights.shape.num_kv_heads
        prompts = [self._prompts[place] for place in places.tolist()]
        stops = counts.cumsum(0) * group
        shared = SharedPrompts(
            starts=(stops - counts * group).tolist(),
            stops=stops.tolist(),
            keys_LKCD=[prompt.keys_LKCD for prompt in prompts],
            values_LKCD=[prompt.values_LKCD for prompt in prompts],
            longest=max(prompt.keys_LKCD.shape[2] for prompt in prompts),
            order_B=order_B,
            ranks_B=order_B.argsort(),
        )
        return _RowShare(rows.start, rows.stop, shared)


class _PromptKV(NamedTuple):
    """Keys and values of one prompt."""

    keys_LKCD: Tensor
    values_LKCD: Tensor


class _RowShare(NamedTuple):
    """The rows of one thread: slots `start` to `stop`."""

    start: int
    stop: int
    prompts: "SharedPrompts"


# -- how rows and prompts are shared among threads ---------------------------------------------------------


def split_rows(num_rows: int, num_threads: int) -> list[range]:
    """Divides slots 0 .. num_rows-1 evenly among threads, with at least MIN_ROWS for each."""
    num = max(1, min(num_threads, num_rows // MIN_ROWS))
    bounds = [num_rows * at // num for at in range(num + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def batch_by_length(prompts: Iterable[Prompt]) -> list[list[Prompt]]:
    """Sorts prompts by length into batches with little padding."""
    batches: list[list[Prompt]] = []
    for prompt in sorted(prompts, key=len):
        if batches and len(prompt) <= MAX_PADDING * len(batches[-1][0]) + PADDING_TOKENS:
            batches[-1].append(prompt)
        else:
            batches.append([prompt])
    return batches


def split_prompts(batches: Sequence[Sequence[Prompt]], num_threads: int) -> list[list[Prompt]]:
    """Divides batches that have more than a thread's share of the tokens. Returns the largest batch first."""
    if num_threads > 1:
        total = sum(len(prompt) for batch in batches for prompt in batch)
        most = max(MIN_PROMPT_TOKENS, -(-total // num_threads))
        batches = [part for batch in batches for part in _split_batch(batch, most)]
    return sorted(map(list, batches), key=lambda batch: -sum(map(len, batch)))


def _split_batch(batch: Sequence[Prompt], max_tokens: int) -> list[list[Prompt]]:
    parts: list[list[Prompt]] = []
    tokens_left = 0
    for prompt in batch:
        if not parts or len(prompt) > tokens_left:
            parts.append([])
            tokens_left = max_tokens
        parts[-1].append(prompt)
        tokens_left -= len(prompt)
    return parts


class CoreThreads:
    """Threads that each compute a share of the rows on one core, from the first layer to the drawn token.

    torch's own threads divide every operation instead and synchronise after each one: a thousand times a step, most of
    the operations too small to be divided. These threads synchronise once a step. Each reads all the weights, so they
    pay off where each has enough rows to be limited by computing rather than by reading.
    """

    def __init__(self) -> None:
        """Starts as many threads as torch uses in the calling thread."""
        self.num = torch.get_num_threads()
        self._pool = single_core_pool(self.num, "core") if self.num > 1 else None
        _keep_freed_memory()

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Runs the jobs and returns their results in order. Jobs start in this order, so put the longest first."""
        if self._pool is None or len(jobs) == 1:  # a single job may use all of torch's threads
            return [job() for job in jobs]
        return [done.result() for done in [self._pool.submit(_in_inference_mode, job) for job in jobs]]


def single_core_pool(num: int, name: str) -> ThreadPoolExecutor:
    """Starts threads in which torch uses no further threads. The calling thread keeps its own setting."""
    mine = torch.get_num_threads()
    pool = ThreadPoolExecutor(num, thread_name_prefix=name)
    all_started = threading.Barrier(num)

    def initialise(_: int) -> None:
        all_started.wait(START_S)  # otherwise one thread could run several of these calls
        torch.get_num_threads()  # a thread's first use reads the number set last in any thread; do that before setting it
        torch.set_num_threads(1)

    list(pool.map(initialise, range(num)))
    torch.set_num_threads(mine)  # threads started later use the number that was set last
    return pool


def _keep_freed_memory() -> None:
    """Makes the GNU allocator keep freed memory, by freeing one large block.

    Without it each thread's memory is returned to the system and requested again in every step.
    """
    torch.empty(LARGEST_BLOCK_BYTES, dtype=torch.uint8)


@torch.inference_mode()
def _in_inference_mode(job: Callable[[], T]) -> T:
    """Runs a job in inference mode, which torch sets for each thread separately."""
    return job()


# -- the layers, written so that TorchScript can run them --------------------------------------------------


class SharedPrompts(NamedTuple):
    """The prompts of one thread's rows.

    Queries `starts[i]` to `stops[i]` of one kv head, with rows sorted by prompt, have prompt i.
    """

    starts: list[int]
    stops: list[int]
    keys_LKCD: list[Tensor]
    values_LKCD: list[Tensor]
    longest: int
    order_B: Tensor
    """The rows sorted by prompt."""
    ranks_B: Tensor
    """Position of each row in that order."""


class StepInputs(NamedTuple):
    """Inputs that all layers of a step share."""

    cos_B1D: Tensor
    signed_sin_B1D: Tensor
    index_B: Tensor
    """0 .. B-1."""
    own_B: Tensor
    """Index of this step's token among the row's new tokens."""
    num_own: int
    beyond_BN: Tensor
    """True for new-token positions that a row has not reached."""
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
    x_BH: Tensor, layers: list[FusedLayer], heads: Heads, prompts: SharedPrompts, inputs: StepInputs
) -> Tensor:
    """Runs all layers and stores the new keys and values."""
    for number, layer in enumerate(layers):
        qkv_BQD = _project(norm(x_BH, layer.input_norm_H, heads.eps), layer, heads, inputs)
        mixed_BQ = _attend(qkv_BQD, number, heads, prompts, inputs).to(x_BH.dtype)
        x_BH = x_BH + linear(mixed_BQ, layer.o_HQ)
        gate_up_BF = linear(norm(x_BH, layer.post_norm_H, heads.eps), layer.gate_up_FH)
        gate_BF, up_BF = gate_up_BF.chunk(2, -1)
        x_BH = x_BH + linear(F.silu(gate_BF).mul_(up_BF), layer.down_HF)
    return x_BH


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()  # rounds where the decoder rounds
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _project(normed_BH: Tensor, layer: FusedLayer, heads: Heads, inputs: StepInputs) -> Tensor:
    """Returns rotated queries and keys, and values, as float32 [B, heads + 2 kv heads, D]."""
    qkv_BQD = linear(normed_BH, layer.qkv_QH, layer.qkv_bias_Q).view(len(normed_BH), -1, heads.dim)
    first_v = heads.num + heads.num_kv
    qk_BMD = qkv_BQD[:, :first_v]
    q_norm_D, k_norm_D = layer.q_norm_D, layer.k_norm_D
    if q_norm_D is not None and k_norm_D is not None:
        q_BND = norm(qk_BMD[:, : heads.num], q_norm_D, heads.eps)
        k_BKD = norm(qk_BMD[:, heads.num :], k_norm_D, heads.eps)
        qk_BMD = torch.cat((q_BND, k_BKD), dim=1)
    rotated_BMD = torch.addcmul(
        qk_BMD * inputs.cos_B1D, qk_BMD.roll(heads.dim // 2, -1), inputs.signed_sin_B1D
    )
    qkv_BQD[:, :first_v] = rotated_BMD
    return qkv_BQD.float()


def _attend(qkv_BQD: Tensor, number: int, heads: Heads, prompts: SharedPrompts, inputs: StepInputs) -> Tensor:
    """Stores the new keys and values and returns the attention output, float32 [B, heads * D]."""
    num_rows, kv_heads, num_own = len(qkv_BQD), heads.num_kv, inputs.num_own
    keys_BCKD, values_BCKD = inputs.keys_LBCKD[number], inputs.values_LBCKD[number]
    first_v = heads.num + kv_heads
    keys_BCKD[inputs.index_B, inputs.own_B] = qkv_BQD[:, heads.num : first_v]
    values_BCKD[inputs.index_B, inputs.own_B] = qkv_BQD[:, first_v:]
    # Heads that share keys take the place of query positions, so that no key is copied.
    q_BKGD = (qkv_BQD[:, : heads.num] * heads.dim**-0.5).view(num_rows, kv_heads, -1, heads.dim)
    q_KRD = q_BKGD[prompts.order_B].transpose(0, 1).reshape(kv_heads, -1, heads.dim)
    scores_KRC = inputs.scores_KRC
    for at, start in enumerate(prompts.starts):
        keys_KDC = prompts.keys_LKCD[at][number].transpose(1, 2)
        scores = scores_KRC[:, start : prompts.stops[at], : keys_KDC.shape[2]]
        torch.bmm(q_KRD[:, start : prompts.stops[at]], keys_KDC, out=scores)
    own_keys = keys_BCKD[:, :num_own].transpose(1, 2).flatten(0, 1)
    own_values = values_BCKD[:, :num_own].transpose(1, 2).flatten(0, 1)
    own_BKGN = torch.bmm(q_BKGD.flatten(0, 1), own_keys.transpose(1, 2)).view(num_rows, kv_heads, -1, num_own)
    own_BKGN.masked_fill_(inputs.beyond_BN[:, None, None], float("-inf"))
    by_row = [kv_heads, num_rows, heads.num // kv_heads, -1]
    scores_KRC.view(by_row)[:, :, :, prompts.longest :] = own_BKGN[prompts.order_B].transpose(0, 1)
    weights_KRC = scores_KRC.softmax(-1)
    mixed_KRD = torch.empty_like(q_KRD)
    for at, start in enumerate(prompts.starts):
        values_KCD = prompts.values_LKCD[at][number]
        weights = weights_KRC[:, start : prompts.stops[at], : values_KCD.shape[1]]
        torch.bmm(weights, values_KCD, out=mixed_KRD[:, start : prompts.stops[at]])
    own_weights = weights_KRC.view(by_row)[:, :, :, prompts.longest :].transpose(0, 1)[prompts.ranks_B]
    from_prompts = mixed_KRD.view(by_row).transpose(0, 1)[prompts.ranks_B]
    own = torch.bmm(own_weights.flatten(0, 1), own_values)
    return own.view(num_rows, -1) + from_prompts.reshape(num_rows, -1)


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
