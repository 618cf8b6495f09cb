"""Generates the most likely tokens, without sampling: for judge models, whose texts must come out the same every time.

Rows are sorted by length and computed in batches that depend only on the prompts, so the same prompts give the same batches and, on
the same kind of processor, the same numbers.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.model.decoder import Decoder, KVCache, run_prompts
from shoal.model.transformers_model import CachedRows, TransformersModel

BATCH_TOKENS = 1 << 15
"""Most tokens of a batch, prompts and answers together, with padding."""


@torch.inference_mode()
def generate_greedily(
    model: Decoder | TransformersModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    end_tokens: frozenset[int],
    check: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """Returns the answer to each prompt, without its end token. `check` is called before each token and may raise."""
    answers: list[list[int]] = [[] for _ in prompts]
    for places in _batches(model, prompts, max_new_tokens):
        rows = _Rows(model, [prompts[place] for place in places], max_new_tokens)
        running = set(places)
        for _ in range(max_new_tokens):
            check()
            logits_BV = model.logits(rows.last_BH).float()
            # The most likely token of each row; of equally likely ones, that with the lowest number.
            next_B = (logits_BV == logits_BV.amax(dim=-1, keepdim=True)).int().argmax(dim=-1)
            for place, token in zip(places, next_B.tolist(), strict=True):
                if place in running and token in end_tokens:
                    running.discard(place)
                elif place in running:
                    answers[place].append(token)
            if not running:
                break
            rows.feed(next_B)
    return answers


def _batches(
    model: Decoder | TransformersModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[list[int]]:
    """Returns for each batch the indices of its prompts. The caches of transformers need prompts of one length."""
    batches: list[list[int]] = []
    for place in sorted(range(len(prompts)), key=lambda place: (len(prompts[place]), place)):
        length = len(prompts[place])
        fits = batches and (len(batches[-1]) + 1) * (length + max_new_tokens) <= BATCH_TOKENS
        same = isinstance(model, Decoder) or (batches and len(prompts[batches[-1][0]]) == length)
        if fits and same:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches


class _Rows:
    """Rows that grow by one token at a time."""

    def __init__(
        self, model: Decoder | TransformersModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> None:
        self._model = model
        device = model.head().weight_VH.device
        if isinstance(model, Decoder):
            self._lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
            longest = max(map(len, prompts)) + max_new_tokens
            self._cache = KVCache(model, num_slots=len(prompts), max_context=longest)
            self.last_BH = run_prompts(model, prompts, self._cache)
        else:
            self._cached = CachedRows(model)
            self.last_BH = self._cached.feed(torch.tensor(prompts, device=device))[:, -1]

    def feed(self, next_B: Tensor) -> None:
        """Appends a token to each row."""
        if isinstance(self._model, Decoder):
            self._cache.context += 1
            states_B1H = self._model(next_B[:, None], self._lengths_B[:, None], cache=self._cache)
            self._lengths_B = self._lengths_B + 1
        else:
            states_B1H = self._cached.feed(next_B[:, None])
        self.last_BH = states_B1H[:, -1]
