"""From the coordinator's batch and the stored rollout tables to samples with advantages."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from shoal.trainer.config import AdvantageKind
from shoal.trainer.data.advantage import group_advantages
from shoal.wire.messages import Batch, Group
from shoal.wire.rollouts import Rollout, RolloutTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer to learn from: tokens = prompt + output, logprobs = the worker's, one per output token."""

    tokens: tuple[int, ...]
    prompt_len: int
    logprobs: tuple[float, ...]
    advantage: float
    lag: int
    """Trainer's version minus the version that wrote the answer."""
    group: int = 0
    """Which group of its batch it belongs to."""

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.prompt_len


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """What the step from `version` trains on."""

    version: int
    samples: tuple[Sample, ...]
    num_groups: int
    dropped_groups: int
    reward_mean: float
    stale_groups: int = 0
    waited_on: str = ""
    """What the coordinator last said the batch was waiting for; empty if it was there at once."""
    dropped_share: float = 0.0
    unparseable: float = 0.0

    @property
    def num_outputs(self) -> int:
        return sum(sample.num_outputs for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)

    def split(self, num_parts: int) -> list[tuple[Sample, ...]]:
        """Parts of whole groups, as equal in groups as they can be.

        Groups go round the parts: the coordinator hands out the oldest first, and no update shall have only those.
        """
        groups = [tuple(members) for _, members in groupby(self.samples, key=lambda sample: sample.group)]
        if len(groups) < num_parts:
            raise ValueError(
                f"batch {self.version}: {len(groups)} groups cannot be cut into optimizer_steps={num_parts} parts; "
                "lower it or raise groups_per_step"
            )
        return [
            tuple(sample for group in groups[part::num_parts] for sample in group)
            for part in range(num_parts)
        ]


def build_batch(
    batch: Batch,
    tables: Mapping[str, RolloutTable],
    *,
    max_lag: int,
    advantage: AdvantageKind,
    waited_on: str = "",
) -> TrainBatch:
    """Samples of every group, in the batch's order. `tables` is by SHA-256; ValueError names what does not fit."""
    rows_by_group = _rows_by_group(tables)
    samples: list[Sample] = []
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
        rows = _rows_of(group, tables, rows_by_group)
        samples.extend(_samples(rows, group_advantages(group.rewards, advantage), lag=lag, group=index))
    if not samples:
        raise ValueError(
            f"batch {batch.version} holds no groups; the coordinator must not hand out an empty one"
        )
    return TrainBatch(
        version=batch.version,
        samples=tuple(samples),
        num_groups=len(batch.groups),
        dropped_groups=batch.dropped_groups,
        reward_mean=batch.reward_mean,
        stale_groups=batch.stale_groups,
        waited_on=waited_on,
        dropped_share=batch.dropped_share,
        unparseable=batch.unparseable,
    )


def _rows_by_group(tables: Mapping[str, RolloutTable]) -> dict[tuple[str, int], list[Rollout]]:
    rows: dict[tuple[str, int], list[Rollout]] = defaultdict(list)
    for sha256, table in tables.items():
        for row in table.rows:
            rows[sha256, row.prompt_index].append(row)
    return rows


def _rows_of(
    group: Group, tables: Mapping[str, RolloutTable], rows_by_group: Mapping[tuple[str, int], list[Rollout]]
) -> list[Rollout]:
    """The group's rows in sample order, which is the order of its rewards."""
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
            f"object {group.sha256}: the rows of prompt {group.prompt_index} have no common prompt"
        )
    return rows


def _samples(rows: list[Rollout], advantages: list[float], *, lag: int, group: int) -> list[Sample]:
    return [
        Sample(
            tokens=row.prompt_tokens + row.output_tokens,
            prompt_len=len(row.prompt_tokens),
            logprobs=row.logprobs,
            advantage=advantage,
            lag=lag,
            group=group,
        )
        for row, advantage in zip(rows, advantages, strict=True)
    ]
