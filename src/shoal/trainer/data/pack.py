"""Packs samples of any length into shared rows, so that few padding tokens are computed.

    row 0:  | sample 3 ............ | sample 0 ... | sample 7 . | pad |
    row 1:  | sample 5 .......... | sample 1 ..... | sample 2 ... |

First-fit decreasing. Positions restart with every sample, and tokens attend only to their own sample, so a sample's
log-probs do not depend on its neighbours. A sample's last token predicts nothing and is left out.

B rows, T tokens per row, N output tokens in all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from shoal.diloco.ranks import Ranks
from shoal.trainer.data.batch import TrainSample

PAD_SEGMENT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Packed rows that are computed in one forward pass."""

    tokens_BT: Tensor
    positions_BT: Tensor
    segments_BT: Tensor
    """Index in its row of the sample that a token belongs to; PAD_SEGMENT for padding."""
    predictors_N: Tensor
    """Position in the flattened rows that predicts each output token: the one before it."""
    targets_N: Tensor
    behaviour_N: Tensor
    advantages_N: Tensor
    lags_N: Tensor
    samples_N: Tensor
    """Index in the micro-batch of the sample that an output token belongs to: 0, 1, ... in order. Samples are not split."""

    by_temperature: tuple[tuple[float, Tensor], ...]
    """Each sampling temperature of the micro-batch, and the indices of its output tokens. Usually there is only one."""

    def to(self, device: torch.device) -> "MicroBatch":
        return self._with_tensors(lambda _, tensor: tensor.to(device))

    def without_outputs(self) -> "MicroBatch":
        """Returns the first two tokens of the micro-batch, with no output token to train on."""
        return self._with_tensors(lambda name, tensor: tensor[:1, :2] if name.endswith("_BT") else tensor[:0])

    def _with_tensors(self, change: Callable[[str, Tensor], Tensor]) -> "MicroBatch":
        names = (field.name for field in fields(self) if field.name != "by_temperature")
        changed = {name: change(name, getattr(self, name)) for name in names}
        places = tuple((temperature, change("", places)) for temperature, places in self.by_temperature)
        return MicroBatch(**changed, by_temperature=places)


def fit_rows(samples: Sequence[TrainSample], row_tokens: int) -> list[list[TrainSample]]:
    """Assigns samples to rows: the longest first, each to the first row with enough free tokens."""
    rows: list[list[TrainSample]] = []
    free_tokens: list[int] = []
    # sorted() is stable, so the same samples give the same rows, and a resumed run adds gradients in the same order.
    for sample in sorted(samples, key=_width, reverse=True):
        width = _width(sample)
        if width > row_tokens:
            raise ValueError(
                f"a sample of {sample.prompt_len} prompt + {sample.num_outputs} output tokens does not fit "
                f"row_tokens={row_tokens}; raise it to at least {width} or lower max_new_tokens"
            )
        index = next((index for index, free in enumerate(free_tokens) if width <= free), len(rows))
        if index == len(rows):
            rows.append([])
            free_tokens.append(row_tokens)
        rows[index].append(sample)
        free_tokens[index] -= width
    return rows


def pack(samples: Sequence[TrainSample], *, row_tokens: int, rows_per_micro_batch: int) -> list[MicroBatch]:
    """Returns micro-batches of `rows_per_micro_batch` rows, each as wide as its fullest row."""
    rows = fit_rows(samples, row_tokens)
    return [
        _to_tensors(rows[start : start + rows_per_micro_batch])
        for start in range(0, len(rows), rows_per_micro_batch)
    ]


def pack_for_rank(
    samples: Sequence[TrainSample], ranks: Ranks, *, row_tokens: int, rows_per_micro_batch: int
) -> list[MicroBatch]:
    """Returns this rank's micro-batches. Every rank gets the same number, because each one takes part in collectives.

    Rows are dealt round-robin to the ranks, the fullest first. A rank with fewer rows gets micro-batches without output
    tokens at the end, whose loss and gradient are zero.
    """
    if ranks.size == 1:
        return pack(samples, row_tokens=row_tokens, rows_per_micro_batch=rows_per_micro_batch)
    rows = fit_rows(samples, row_tokens)
    mine = [sample for row in rows[ranks.rank :: ranks.size] for sample in row]
    micros = pack(mine or samples[:1], row_tokens=row_tokens, rows_per_micro_batch=rows_per_micro_batch)
    empty = micros[0].without_outputs()
    micros = micros if mine else []
    wanted = round(ranks.largest(len(micros)))
    return micros + [empty] * (wanted - len(micros))


def _width(sample: TrainSample) -> int:
    return len(sample.tokens) - 1


def _to_tensors(rows: list[list[TrainSample]]) -> MicroBatch:
    num_rows, width = len(rows), max(sum(_width(sample) for sample in row) for row in rows)
    tokens_BT = torch.zeros(num_rows, width, dtype=torch.long)
    positions_BT = torch.zeros(num_rows, width, dtype=torch.long)
    segments_BT = torch.full((num_rows, width), PAD_SEGMENT, dtype=torch.long)
    predictors: list[Tensor] = []
    targets: list[Tensor] = []
    for index, row in enumerate(rows):
        start = 0
        for segment, sample in enumerate(row):
            end = start + _width(sample)
            tokens = torch.as_tensor(sample.tokens, dtype=torch.long)
            tokens_BT[index, start:end] = tokens[:-1]
            positions_BT[index, start:end] = torch.arange(end - start)
            segments_BT[index, start:end] = segment
            first = index * width + start + sample.prompt_len - 1
            predictors.append(torch.arange(first, first + sample.num_outputs))
            targets.append(tokens[sample.prompt_len :])
            start = end
    samples = [sample for row in rows for sample in row]
    # One number per sample, repeated per token: Python lists with one number per token took 10 % of a small model's step.
    outputs = torch.tensor([sample.num_outputs for sample in samples])
    temperatures = torch.tensor([sample.temperature for sample in samples], dtype=torch.float64)
    temperatures_N = temperatures.repeat_interleave(outputs)
    return MicroBatch(
        tokens_BT=tokens_BT,
        positions_BT=positions_BT,
        segments_BT=segments_BT,
        predictors_N=torch.cat(predictors),
        targets_N=torch.cat(targets),
        behaviour_N=torch.cat([torch.as_tensor(one.logprobs, dtype=torch.float32) for one in samples]),
        advantages_N=torch.tensor([sample.advantage for sample in samples]).repeat_interleave(outputs),
        lags_N=torch.tensor([sample.lag for sample in samples]).repeat_interleave(outputs),
        samples_N=torch.arange(len(samples)).repeat_interleave(outputs),
        by_temperature=tuple(
            (temperature, (temperatures_N == temperature).nonzero().squeeze(1))
            for temperature in temperatures.unique().tolist()
        ),
    )
