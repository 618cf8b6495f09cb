"""Packing: samples of any length share rows, so that hardly a padded token is computed.

    row 0:  | sample 3 ............ | sample 0 ... | sample 7 . | pad |
    row 1:  | sample 5 .......... | sample 1 ..... | sample 2 ... |

First-fit decreasing. Positions restart with every sample and tokens attend only inside their own, so a sample's
log-probs do not depend on its neighbours. A sample's last token predicts nothing and takes no place.

B rows, T tokens a row, N output tokens in all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from shoal.trainer.data.batch import Sample

PAD_SEGMENT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    tokens_BT: Tensor
    positions_BT: Tensor
    segments_BT: Tensor
    """Which sample of its row a token belongs to; PAD_SEGMENT where none."""
    predictors_N: Tensor
    """Where in the flattened rows each output token is predicted: the place before it."""
    targets_N: Tensor
    behaviour_N: Tensor
    advantages_N: Tensor
    lags_N: Tensor
    samples_N: Tensor
    """Which sample of the micro-batch an output token stands in: 0, 1, ... in order. A sample is never split."""

    def to(self, device: torch.device) -> "MicroBatch":
        return MicroBatch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def fit_rows(samples: Sequence[Sample], row_tokens: int) -> list[list[Sample]]:
    """Samples by row: the longest first, each into the first row that has room."""
    rows: list[list[Sample]] = []
    room: list[int] = []
    # sorted() is stable, so the same samples always come to lie the same way: a resumed run adds up in the same order.
    for sample in sorted(samples, key=_width, reverse=True):
        width = _width(sample)
        if width > row_tokens:
            raise ValueError(
                f"a sample of {sample.prompt_len} prompt + {sample.num_outputs} output tokens does not fit "
                f"row_tokens={row_tokens}; raise it to at least {width} or lower max_new_tokens"
            )
        index = next((index for index, free in enumerate(room) if width <= free), len(rows))
        if index == len(rows):
            rows.append([])
            room.append(row_tokens)
        rows[index].append(sample)
        room[index] -= width
    return rows


def pack(samples: Sequence[Sample], *, row_tokens: int, rows_per_micro_batch: int) -> list[MicroBatch]:
    """Micro-batches of `rows_per_micro_batch` rows, each as wide as its fullest row."""
    rows = fit_rows(samples, row_tokens)
    return [
        _to_tensors(rows[start : start + rows_per_micro_batch])
        for start in range(0, len(rows), rows_per_micro_batch)
    ]


def _width(sample: Sample) -> int:
    return len(sample.tokens) - 1


def _to_tensors(rows: list[list[Sample]]) -> MicroBatch:
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
            tokens = torch.tensor(sample.tokens)
            tokens_BT[index, start:end] = tokens[:-1]
            positions_BT[index, start:end] = torch.arange(end - start)
            segments_BT[index, start:end] = segment
            first = index * width + start + sample.prompt_len - 1
            predictors.append(torch.arange(first, first + sample.num_outputs))
            targets.append(tokens[sample.prompt_len :])
            start = end
    samples = [sample for row in rows for sample in row]
    # One number a sample, told apart from one number a token: lists of the latter took a tenth of a small model's step.
    outputs = torch.tensor([sample.num_outputs for sample in samples])
    return MicroBatch(
        tokens_BT=tokens_BT,
        positions_BT=positions_BT,
        segments_BT=segments_BT,
        predictors_N=torch.cat(predictors),
        targets_N=torch.cat(targets),
        behaviour_N=torch.cat([torch.tensor(sample.logprobs) for sample in samples]),
        advantages_N=torch.tensor([sample.advantage for sample in samples]).repeat_interleave(outputs),
        lags_N=torch.tensor([sample.lag for sample in samples]).repeat_interleave(outputs),
        samples_N=torch.arange(len(samples)).repeat_interleave(outputs),
    )
