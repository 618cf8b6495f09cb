"""TorchEngine: our own small continuous-batching decoder.

    submit ──▶ waiting ──admit──▶ prefill, once per distinct prompt ──▶ slots ──decode, a token a step──▶ finished
                                  └ first token of each row              └ state of each fed token, for its proof

A row of N tokens is fed N-1 of them: the first is drawn from the prompt's last state, the last is never fed.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal import toploc
from shoal.model.cache import KVCache
from shoal.model.decoder import Decoder
from shoal.model.load import DTYPES, load_decoder
from shoal.model.shape import read_shape
from shoal.model.tokenizer import Tokenizer, load_tokenizer
from shoal.model.weights import WEIGHTS_FILE, load_weights
from shoal.rollout.engine import Finished, Request
from shoal.rollout.rows import Rows, distinct_prompts, prefill_batches
from shoal.rollout.sampling import draw_tokens
from shoal.wire.draw import uniforms
from shoal.wire.rollouts import Finish
from shoal.wire.run import ProofSpec

PREFILL_TOKENS = 8192
"""Prompt tokens computed at once: enough to fill a device, few enough that activations stay small."""

PROVE_ROWS = 64
"""Finished rows wait until this many can be proven together: a call costs 2 ms however few they are, a row 0.1 ms."""


class TorchEngine:
    def __init__(
        self,
        *,
        compute_dtype: Literal["float32", "bfloat16"],
        proof: ProofSpec,
        max_rows: int,
        device: str = "cpu",
    ) -> None:
        if compute_dtype not in DTYPES:
            raise ValueError(f"compute_dtype={compute_dtype!r} must be one of {sorted(DTYPES)}")
        self.policy_version: int | None = None
        self._dtype = DTYPES[compute_dtype]
        self._proof = proof
        self._device = torch.device(device)
        self._rows = Rows(max_rows)
        self._model: _Loaded | None = None
        self._slots: _Slots | None = None
        self._unproven: list[tuple[Finished, Tensor]] = []

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded().tokenizer

    @property
    def has_work(self) -> bool:
        return bool(self._rows.waiting or self._rows.running or self._unproven)

    def load(self, folder: Path, version: int) -> None:
        if self.has_work:
            raise ValueError(
                f"version {version} came while rows of version {self.policy_version} are unfinished; finish them first"
            )
        self.policy_version = None  # until the copy is complete the weights are neither version
        if self._model is None:
            self._model = _Loaded(folder, self._dtype, self._device)
        elif (shape := read_shape(folder)) != self._model.decoder.shape:
            raise ValueError(f"{folder}: {shape} is not what this engine was built for; start a new engine")
        else:
            load_weights(self._model.decoder, folder / WEIGHTS_FILE)
        self.policy_version = version

    def submit(self, requests: Sequence[Request]) -> None:
        max_positions = self._loaded().decoder.shape.max_positions
        for request in requests:
            _check_request(request, max_positions)
        self._rows.submit(requests)

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        if self.policy_version is None:
            raise ValueError("the engine holds no complete weights; load a version first")
        self._take_out(self._admit())
        if self._rows.running:
            self._take_out(self._decode())
        return self._prove()

    def _loaded(self) -> "_Loaded":
        if self._model is None:
            raise ValueError("the engine holds no model; load a version first")
        return self._model

    def _admit(self) -> list[int]:
        """Start waiting rows and draw their first tokens. Returns the slots that this finished."""
        first = self._rows.num_running
        admitted = self._rows.admit()
        if not admitted:
            return []
        slots = self._make_room(admitted, num_used=first)
        decoder = self._loaded().decoder
        logits_BV = torch.empty(
            len(admitted), decoder.shape.vocab_size, dtype=self._dtype, device=self._device
        )
        places = distinct_prompts(admitted)
        for prompts in prefill_batches(list(places), PREFILL_TOKENS):
            cache, logits_PV = _prefill(decoder, prompts, self._device)
            pairs = [(place, index) for index, prompt in enumerate(prompts) for place in places[prompt]]
            places_B, index_B = (self._tensor(list(column)) for column in zip(*pairs, strict=True))
            logits_BV[places_B] = logits_PV[index_B]
            slots.cache.copy_from(
                cache, source_slots=index_B, slots=places_B + first, context=cache.max_context
            )
        temperatures = torch.tensor([request.temperature for request in admitted])
        slots.temperature_S[first : first + len(admitted)] = temperatures.to(self._device)
        return self._draw(slots, logits_BV, first)

    def _decode(self) -> list[int]:
        """Feed every running row its newest token and draw the next. Returns the slots that this finished."""
        assert self._slots is not None
        slots, decoder = self._slots, self._loaded().decoder
        num_rows = self._rows.num_running
        positions_B = self._rows.fed_positions()
        slots.cache.context = int(positions_B.max()) + 1
        hidden_BH = decoder(
            slots.newest_S1[:num_rows], self._tensor(positions_B)[:, None], cache=slots.cache
        )[:, 0]
        fed_B = self._tensor(self._rows.counts_S[:num_rows] - 1)
        slots.states_SNH[slots.index_S[:num_rows], fed_B] = hidden_BH.to(torch.bfloat16)
        return self._draw(slots, decoder.logits(hidden_BH), 0)

    def _draw(self, slots: "_Slots", logits_BV: Tensor, first: int) -> list[int]:
        """Draw a token for each of the rows from slot `first` on; returns the slots of rows that end with it."""
        rows, last = self._rows, first + logits_BV.shape[0]
        counts_B = rows.counts_S[first:last]
        uniforms_B = uniforms(rows.seeds_S[first:last], counts_B.astype(np.uint64))
        tokens_B, logprobs_B = draw_tokens(
            logits_BV, slots.temperature_S[first:last], torch.from_numpy(uniforms_B).to(self._device)
        )
        at = (slots.index_S[first:last], self._tensor(counts_B))
        slots.tokens_SN[at], slots.logprobs_SN[at] = tokens_B, logprobs_B
        slots.newest_S1[first:last, 0] = tokens_B
        counts_B += 1
        ended_B: npt.NDArray[np.bool_] = self._loaded().is_end_V[tokens_B].cpu().numpy()
        done: list[int] = (np.flatnonzero(ended_B | (counts_B >= rows.caps_S[first:last])) + first).tolist()
        return done

    def _take_out(self, done: list[int]) -> None:
        """Free the slots of these rows; what they need for their proofs goes along."""
        if not done:
            return
        assert self._slots is not None
        slots, counts_S = self._slots, self._rows.counts_S
        for slot in done:
            tokens = slots.tokens_SN[slot, : counts_S[slot]].tolist()
            ended = tokens[-1] in self._loaded().tokenizer.end_tokens
            row = Finished(
                request=self._rows.running[slot],
                output_tokens=tuple(tokens),
                logprobs=tuple(slots.logprobs_SN[slot, : counts_S[slot]].tolist()),
                finish=Finish.EOS if ended else Finish.LENGTH,
                proof=b"",
            )
            self._unproven.append((row, slots.states_SNH[slot, : counts_S[slot] - 1].clone()))
        if moves := self._rows.remove(done):
            sources, targets = ([move[end] for move in moves] for end in (0, 1))
            context = int((self._rows.prompt_lens_S + counts_S)[targets].max())
            slots.move(self._tensor(sources), self._tensor(targets), context=context)

    def _prove(self) -> list[Finished]:
        """Build proofs once enough rows wait for theirs, or nothing else is left to do."""
        if len(self._unproven) < PROVE_ROWS and (self._rows.running or self._rows.waiting):
            return []
        rows, self._unproven = self._unproven, []
        proofs = toploc.build_proofs(
            [states for _, states in rows],
            topk=self._proof.topk,
            segment_tokens=self._proof.segment_tokens,
        )
        return [replace(row, proof=proof) for (row, _), proof in zip(rows, proofs, strict=True)]

    def _make_room(self, admitted: Sequence[Request], *, num_used: int) -> "_Slots":
        """Slots enough and long enough for these rows too; what the first `num_used` hold is kept."""
        need = _Room(
            rows=self._rows.num_running,
            # Rounded up, so that prompts a little longer next time change nothing.
            context=-(-max(len(row.prompt_tokens) + row.max_new_tokens - 1 for row in admitted) // 32) * 32,
            new_tokens=max(row.max_new_tokens for row in admitted),
        )
        old = self._slots
        if old is not None:
            need = _Room(*(max(had, wanted) for had, wanted in zip(old.room, need, strict=True)))
            if need == old.room:
                return old
        self._slots = _Slots(self._loaded().decoder, need, self._device)
        if old is not None:
            self._slots.take_over(old, num_used)
        return self._slots

    def _tensor(self, values: list[int] | npt.NDArray[np.int64]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


class _Loaded:
    """A model and what the engine needs to know of it."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.decoder = load_decoder(folder, dtype, device)
        self.tokenizer = load_tokenizer(folder)
        self.is_end_V = torch.zeros(self.decoder.shape.vocab_size, dtype=torch.bool, device=device)
        self.is_end_V[sorted(self.tokenizer.end_tokens)] = True


class _Room(NamedTuple):
    rows: int
    context: int
    new_tokens: int


class _Slots:
    """Tensors of the running rows, one slot each."""

    def __init__(self, decoder: Decoder, room: _Room, device: torch.device) -> None:
        shape, dtype = decoder.shape, decoder.model.norm.weight.dtype
        rows, context, new_tokens = self.room = room
        self.cache = KVCache(shape, num_slots=rows, max_context=context, dtype=dtype, device=device)
        self.index_S = torch.arange(rows, device=device)
        self.temperature_S = torch.ones(rows, device=device)
        self.newest_S1 = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.tokens_SN = torch.zeros(rows, new_tokens, dtype=torch.long, device=device)
        self.logprobs_SN = torch.zeros(rows, new_tokens, device=device)
        # Proofs are of bfloat16 states whatever the compute dtype; kept so from the start, they take half the memory.
        self.states_SNH = torch.zeros(
            rows, new_tokens - 1, shape.hidden_size, dtype=torch.bfloat16, device=device
        )

    def move(self, sources: Tensor, targets: Tensor, *, context: int) -> None:
        for tensor in self._per_row():
            tensor[targets] = tensor[sources]
        self.cache.copy_from(self.cache, source_slots=sources, slots=targets, context=context)

    def take_over(self, old: "_Slots", num_rows: int) -> None:
        """Copy the first rows of smaller slots."""
        for mine, theirs in zip(self._per_row(), old._per_row(), strict=True):
            if mine.dim() == 1:
                mine[:num_rows] = theirs[:num_rows]
            else:
                mine[:num_rows, : theirs.shape[1]] = theirs[:num_rows]
        rows = self.index_S[:num_rows]
        self.cache.copy_from(old.cache, source_slots=rows, slots=rows, context=old.cache.max_context)

    def _per_row(self) -> tuple[Tensor, ...]:
        return (self.temperature_S, self.newest_S1, self.tokens_SN, self.logprobs_SN, self.states_SNH)


def _prefill(
    decoder: Decoder, prompts: Sequence[tuple[int, ...]], device: torch.device
) -> tuple[KVCache, Tensor]:
    """Keys and values of whole prompts, and the logits after their last tokens, [P, V]."""
    lengths_P = torch.tensor([len(prompt) for prompt in prompts])
    width = int(lengths_P.max())
    padded = [prompt + (0,) * (width - len(prompt)) for prompt in prompts]
    tokens_PT = torch.tensor(padded, device=device)
    positions_PT = torch.arange(width, device=device).expand_as(tokens_PT)
    cache = KVCache(
        decoder.shape,
        num_slots=len(prompts),
        max_context=width,
        dtype=decoder.model.norm.weight.dtype,
        device=device,
    )
    hidden_PTH = decoder(tokens_PT, positions_PT, cache=cache)
    last_PH = hidden_PTH[torch.arange(len(prompts), device=device), (lengths_P - 1).to(device)]
    return cache, decoder.logits(last_PH)


def _check_request(request: Request, max_positions: int) -> None:
    where = f"row ({request.prompt_index}, {request.sample_index})"
    length = len(request.prompt_tokens) + request.max_new_tokens
    if not request.prompt_tokens or request.max_new_tokens < 1 or request.temperature <= 0:
        raise ValueError(
            f"{where}: {len(request.prompt_tokens)} prompt tokens, max_new_tokens={request.max_new_tokens}, "
            f"temperature={request.temperature}; all must be above 0"
        )
    if length > max_positions:
        raise ValueError(
            f"{where}: {len(request.prompt_tokens)} prompt + {request.max_new_tokens} new tokens pass the model's "
            f"{max_positions} positions; lower max_new_tokens"
        )
