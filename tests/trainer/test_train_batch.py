"""Groups and tables become samples with advantages; every mismatch between them is an error that names it."""

import pickle
import statistics
from dataclasses import fields, replace

import pytest
import torch
from tiny_learner import make_batch as make_train_batch

from shoal.trainer.data.batch import BatchTensors, build_batch, group_advantages
from shoal.trainer.data.pack import pack
from shoal.wire.messages import Batch, Group
from shoal.wire.rollouts import Finish, Rollout, RolloutTable

TEMPERATURES = {"sort": 1.0, "sums": 0.6}
LEASE, SHA = "ab" * 16, "cd" * 32


def make_row(prompt_index: int, sample_index: int) -> Rollout:
    return Rollout(
        prompt_index=prompt_index,
        sample_index=sample_index,
        prompt_tokens=(1, 2, 10 + prompt_index),
        output_tokens=(3 + sample_index, 9),
        logprobs=(-0.5, -0.25 * (sample_index + 1)),
        finish=Finish.EOS,
        proof=b"",
    )


def make_table(version: int = 4) -> RolloutTable:
    rows = tuple(make_row(prompt, sample) for prompt in range(2) for sample in range(2))
    return RolloutTable(lease_id=LEASE, policy_version=version, rows=rows)


def make_group(prompt_index: int, rewards: tuple[float, ...], version: int = 4, task: str = "sort") -> Group:
    return Group(
        group_id=f"g{prompt_index}",
        lease_id=LEASE,
        sha256=SHA,
        prompt_index=prompt_index,
        policy_version=version,
        rewards=rewards,
        task=task,
    )


def make_batch(*groups: Group, version: int = 5) -> Batch:
    return Batch(version=version, groups=groups, dropped_groups=3, stale_groups=0, reward_mean=0.4)


def test_samples_are_in_the_order_of_the_groups() -> None:
    built = build_batch(
        make_batch(make_group(1, (0.0, 1.0)), make_group(0, (1.0, 0.5), task="sums")),
        {SHA: make_table()},
        max_lag=2,
        advantage="mean",
        temperatures=TEMPERATURES,
    )
    assert [sample.tokens for sample in built.samples] == [
        (1, 2, 11, 3, 9),
        (1, 2, 11, 4, 9),
        (1, 2, 10, 3, 9),
        (1, 2, 10, 4, 9),
    ]
    assert [sample.advantage for sample in built.samples] == [-0.5, 0.5, 0.25, -0.25]
    assert [sample.temperature for sample in built.samples] == [1.0, 1.0, 0.6, 0.6]
    assert {sample.lag for sample in built.samples} == {1}
    assert (built.num_groups, built.num_outputs, built.num_tokens, built.told.dropped_groups) == (2, 8, 20, 3)


@pytest.mark.parametrize(
    ("batch", "table", "message"),
    [
        (make_batch(make_group(0, (0.0, 1.0)), version=7), make_table(), "lag 3; max_lag is 2"),
        (make_batch(make_group(0, (0.0, 1.0)), version=3), make_table(), "lag -1"),
        (make_batch(make_group(0, (0.0, 1.0, 1.0))), make_table(), "3 rewards"),
        (make_batch(make_group(2, (0.0, 1.0))), make_table(), "prompt 2 has samples"),
        (make_batch(make_group(0, (0.0, 1.0))), make_table(version=3), "by version 3"),
        (make_batch(make_group(0, (0.0, 1.0)), make_group(0, (0.0, 1.0))), make_table(), "occurs twice"),
        (
            make_batch(make_group(0, (0.0, 1.0), task="other")),
            make_table(),
            "g0 is of task 'other', the run's terms have 'sort', 'sums'",
        ),
        (make_batch(), make_table(), "holds no groups"),
    ],
)
def test_mismatch_is_named(batch: Batch, table: RolloutTable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_batch(batch, {SHA: table}, max_lag=2, advantage="std", temperatures=TEMPERATURES)


def test_mean_advantages() -> None:
    assert group_advantages([0.0, 0.0, 0.5, 1.0], "mean") == pytest.approx([-0.375, -0.375, 0.125, 0.625])


def test_std_advantages_divide_by_the_sample_deviation() -> None:
    rewards = [0.0, 0.25, 1.0, 0.5]
    std = statistics.stdev(rewards)
    expected = [(reward - 0.4375) / (std + 1e-6) for reward in rewards]
    assert group_advantages(rewards, "std") == pytest.approx(expected, abs=1e-12)


def test_equal_rewards_give_zero_advantages() -> None:
    assert group_advantages([0.1] * 7, "std") == pytest.approx([0.0] * 7, abs=1e-9)


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="samples_per_prompt"):
        group_advantages([1.0], "std")


def test_a_batch_survives_its_way_to_another_rank() -> None:
    batch = make_train_batch(3)
    sent = BatchTensors.of(batch)
    received = pickle.loads(pickle.dumps(sent))
    again = received.batch(replace(batch, samples=()))
    assert (again.version, again.num_tokens, again.num_outputs) == (3, batch.num_tokens, batch.num_outputs)
    for micro, other in zip(
        pack(batch.samples, row_tokens=48, rows_per_micro_batch=2),
        pack(again.samples, row_tokens=48, rows_per_micro_batch=2),
        strict=True,
    ):
        for name in (field.name for field in fields(micro) if field.name != "by_temperature"):
            assert torch.equal(getattr(micro, name), getattr(other, name))
        for (temperature, places), received_ones in zip(
            micro.by_temperature, other.by_temperature, strict=True
        ):
            assert temperature == received_ones[0]
            assert torch.equal(places, received_ones[1])
    per_token = sum(getattr(sent, field.name).nbytes for field in fields(sent)) / batch.num_tokens
    assert per_token < 16
