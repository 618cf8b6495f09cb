"""Turns the coordinator's batch and the stored rollout tables into samples with advantages."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from shoal.wire.messages import Batch, Group, TaskFigures
from shoal.wire.rollouts import Rollout, RolloutTable

AdvantageKind = Literal["std", "mean"]
"""The kinds of trainer.config.Recipe, whose import would make the longest chain of imports longer."""
STD_FLOOR = 1e-6
"""Added to the standard deviation, as in the released code. It matters only for rewards that hardly differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One answer to train on: tokens are prompt + output, logprobs the worker's, one per output token."""

    tokens: tuple[int, ...] | Tensor
    """On ranks other than 0 a part of one tensor: a tuple takes 40 bytes a token, an int32 tensor 4."""
    prompt_len: int
    logprobs: tuple[float, ...] | Tensor
    advantage: float
    lag: int
    """The trainer's version minus the version that generated the answer."""
    group: int = 0
    """Index of its group in the batch."""
    temperature: float = 1.0
    """Sampling temperature of its task. Log-probs are those of softmax(logits / temperature)."""

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.prompt_len


_NO_FIGURES = Batch(version=0, groups=(), dropped_groups=0, stale_groups=0, reward_mean=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The samples that the step from `version` trains on."""

    version: int
    samples: tuple[TrainSample, ...]
    num_groups: int
    told: Batch = _NO_FIGURES
    """The coordinator's figures of the batch: its answer without the groups."""
    waited_on: str = ""
    """What the coordinator said the batch was waiting for; empty if it was ready at once."""

    @property
    def num_outputs(self) -> int:
        return sum(sample.num_outputs for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)

    def split(self, num_parts: int) -> list[tuple[TrainSample, ...]]:
        """Splits the samples into minibatches of whole groups, as equal in number of groups as possible.

        Groups are dealt round-robin: the coordinator lists the oldest first, and no update should get only old ones.
        """
        groups = [tuple(members) for _, members in groupby(self.samples, key=lambda sample: sample.group)]
        if len(groups) < num_parts:
            raise ValueError(
                f"batch {self.version}: {len(groups)} groups cannot be split into optimizer_steps={num_parts} parts; "
                "lower it or raise groups_per_step"
            )
        return [
            tuple(sample for group in groups[part::num_parts] for sample in group)
            for part in range(num_parts)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTensors:
    """A batch as a few tensors, in which form it is sent to the other ranks: tuples would take 40 bytes a token.

    S samples, T tokens, N output tokens.
    """

    counts_S4: Tensor
    """Number of tokens, length of the prompt, lag and group of each sample."""
    advantages_S: Tensor
    temperatures_S: Tensor
    tokens_T: Tensor
    logprobs_N: Tensor

    @classmethod
    def of(cls, batch: TrainBatch) -> "BatchTensors":
        samples = batch.samples
        counts = [(len(one.tokens), one.prompt_len, one.lag, one.group) for one in samples]
        return cls(
            counts_S4=torch.tensor(counts, dtype=torch.int64),
            advantages_S=torch.tensor([one.advantage for one in samples], dtype=torch.float64),
            temperatures_S=torch.tensor([one.temperature for one in samples], dtype=torch.float64),
            tokens_T=torch.cat([torch.as_tensor(one.tokens, dtype=torch.int32) for one in samples]),
            logprobs_N=torch.cat([torch.as_tensor(one.logprobs, dtype=torch.float32) for one in samples]),
        )

    def batch(self, header: TrainBatch) -> TrainBatch:
        """Returns `header` with these samples. They share the tensors' memory."""
        samples, token, output = [], 0, 0
        for (length, prompt_len, lag, group), advantage, temperature in zip(
            self.counts_S4.tolist(), self.advantages_S.tolist(), self.temperatures_S.tolist(), strict=True
        ):
            num_outputs = length - prompt_len
            samples.append(
                TrainSample(
                    tokens=self.tokens_T[token : token + length],
                    prompt_len=prompt_len,
                    logprobs=self.logprobs_N[output : output + num_outputs],
                    advantage=advantage,
                    lag=lag,
                    group=group,
                    temperature=temperature,
                )
            )
            token, output = token + length, output + num_outputs
        return replace(header, samples=tuple(samples))


def build_batch(
    batch: Batch,
    tables: Mapping[str, RolloutTable],
    *,
    max_lag: int,
    advantage: AdvantageKind,
    temperatures: Mapping[str, float],
    waited_on: str = "",
) -> TrainBatch:
    """Returns the samples of every group, in the batch's order. `tables` has the rollout tables by SHA-256, `temperatures` those of
    the tasks by title.

    Raises ValueError if a group and its table do not match, or for a group of an unknown task.
    """
    rows_by_group: dict[tuple[str, int], list[Rollout]] = defaultdict(list)
    for sha256, table in tables.items():
        for row in table.rows:
            rows_by_group[sha256, row.prompt_index].append(row)
    samples: list[TrainSample] = []
    seen: set[str] = set()
    for index, group in enumerate(batch.groups):
        if group.group_id in seen:
            raise ValueError(f"batch {batch.version}: group {group.group_id} occurs twice")
        seen.add(group.group_id)
        lag = batch.version - group.policy_version
        if not 0 <= lag <= max_lag:
            raise ValueError(
                f"batch {batch.version}: group {group.group_id} is by version {group.policy_version}, lag {lag}; max_lag is {max_lag}"
            )
        if group.task not in temperatures:
            raise ValueError(
                f"batch {batch.version}: group {group.group_id} is of task {group.task!r}, the run's terms have "
                f"{', '.join(map(repr, temperatures))}"
            )
        rows = _rows_of(group, tables, rows_by_group)
        advantages = group_advantages(group.rewards, advantage)
        samples += [
            TrainSample(
                tokens=row.prompt_tokens + row.output_tokens,
                prompt_len=len(row.prompt_tokens),
                logprobs=row.logprobs,
                advantage=value,
                lag=lag,
                group=index,
                temperature=temperatures[group.task],
            )
            for row, value in zip(rows, advantages, strict=True)
        ]
    if not samples:
        raise ValueError(
            f"batch {batch.version} holds no groups; the coordinator must not hand out an empty one"
        )
    return TrainBatch(
        version=batch.version,
        samples=tuple(samples),
        num_groups=len(batch.groups),
        told=batch.model_copy(update={"groups": (), "tasks": _with_lengths(batch, samples)}),
        waited_on=waited_on,
    )


def _with_lengths(batch: Batch, samples: Sequence[TrainSample]) -> dict[str, TaskFigures]:
    """Returns the figures of each task with the mean length of its answers."""
    lengths: dict[str, list[int]] = defaultdict(list)
    for sample in samples:
        lengths[batch.groups[sample.group].task].append(sample.num_outputs)
    return {
        title: figures.model_copy(
            update={"answer_tokens_mean": sum(lengths[title]) / max(1, len(lengths[title]))}
        )
        for title, figures in batch.tasks.items()
    }


def group_advantages(rewards_G: Sequence[float], kind: AdvantageKind) -> list[float]:
    """Returns how much better each sample of a prompt was than its group.

        mean:  A_i = r_i - mean(r)
        std:   A_i = (r_i - mean(r)) / (std(r) + 1e-6), std with G - 1 in the denominator

    >>> group_advantages([0.0, 1.0], "mean")
    [-0.5, 0.5]
    """
    num_samples = len(rewards_G)
    if num_samples < 2:
        raise ValueError(
            f"a group of {num_samples} has nothing to compare with; set samples_per_prompt to 2 or more"
        )
    mean = math.fsum(rewards_G) / num_samples
    centred_G = [reward - mean for reward in rewards_G]
    if kind == "mean":
        return centred_G
    std = math.sqrt(math.fsum(value * value for value in centred_G) / (num_samples - 1))
    return [value / (std + STD_FLOOR) for value in centred_G]


def _rows_of(
    group: Group, tables: Mapping[str, RolloutTable], rows_by_group: Mapping[tuple[str, int], list[Rollout]]
) -> list[Rollout]:
    """Returns the group's rows in sample order, which is the order of its rewards."""
    table = tables[group.sha256]
    if (table.lease_id, table.policy_version) != (group.lease_id, group.policy_version):
        raise ValueError(
            f"object {group.sha256}: holds lease {table.lease_id} by version {table.policy_version}, "
            f"group {group.group_id} says lease {group.lease_id} by version {group.policy_version}"
        )
    rows = sorted(rows_by_group.get((group.sha256, group.prompt_index), []), key=lambda row: row.sample_index)
    if [row.sample_index for row in rows] != list(range(len(group.rewards))):
        raise ValueError(
            f"object {group.sha256}: prompt {group.prompt_index} has samples {[row.sample_index for row in rows]}, "
            f"group {group.group_id} has {len(group.rewards)} rewards"
        )
    if len({row.prompt_tokens for row in rows}) != 1 or not rows[0].prompt_tokens:
        raise ValueError(
            f"object {group.sha256}: the rows of prompt {group.prompt_index} do not share one prompt"
        )
    return rows
