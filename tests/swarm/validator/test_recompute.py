"""One prefill for many: rows packed end to end, and submissions checked together, give what each gives alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from honest_work import make_lease, make_policy, make_spec, make_table

from shoal.swarm.validator import recompute as recomputing
from shoal.swarm.validator.fact_checks import RowFacts
from shoal.swarm.validator.prefill import CannotCheck, LoadedPolicy, num_fed
from shoal.swarm.validator.recompute import RowsToCheck, _batches, _Entry, recompute, recompute_many
from shoal.wire.codes import Rejected
from shoal.wire.run_spec import Sampling

SPEC = make_spec(sampling=Sampling(max_new_tokens=40, samples_per_prompt=3))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> LoadedPolicy:
    return make_policy(tmp_path_factory.mktemp("models"))


def same(one: RowFacts, other: RowFacts) -> None:
    np.testing.assert_allclose(one.logprobs_T, other.logprobs_T, atol=1e-4)
    np.testing.assert_allclose(one.draw_distance_T, other.draw_distance_T, atol=1e-4)
    np.testing.assert_allclose(one.surprise_variance_T, other.surprise_variance_T, atol=1e-3)
    for a, b in zip(one.segments, other.segments, strict=True):
        assert a.num_values == b.num_values and abs(a.exponent_mismatches - b.exponent_mismatches) <= 2


def test_rows_of_one_token_in_bfloat16(tmp_path: Path) -> None:
    """None of them feeds a token: there is nothing to run behind the prompts."""
    spec = make_spec(compute_dtype="bfloat16", sampling=Sampling(max_new_tokens=1, samples_per_prompt=2))
    lease, policy = make_lease(spec, prompts=2), make_policy(tmp_path, dtype=torch.bfloat16)
    rows = make_table(lease, policy).rows
    for row, facts in zip(rows, recompute(rows, lease, policy, control_seed=1), strict=True):
        np.testing.assert_allclose(facts.logprobs_T, row.logprobs, atol=0.05)
        assert facts.segments == ()


def test_batches_are_of_about_one_size(policy: LoadedPolicy) -> None:
    lease = make_lease(SPEC, prompts=3)
    rows = make_table(lease, policy).rows
    entries = [_Entry(0, place, row, lease) for place, row in enumerate(rows)]
    total = sum(num_fed(row) for row in rows)
    sizes = [sum(num_fed(entry.row) for entry in batch) for batch in _batches(entries, total - 1)]
    assert len(sizes) == 2
    assert min(sizes) > total / 3
    assert list(_batches([], 64)) == []


def test_submissions_checked_together_have_the_facts_of_each_alone(
    policy: LoadedPolicy, tmp_path: Path
) -> None:
    leases = [make_lease(SPEC, number=number, prompts=2) for number in (1, 2, 3)]
    tables = [make_table(lease, policy).rows for lease in leases]
    # A proof of the right form whose modulus merges indices is found by looking at states: one submission's own affair.
    broken = (replace(tables[1][0], proof=b"\x00\x01" + tables[1][0].proof[2:]), *tables[1][1:])
    found = recompute_many(
        [
            RowsToCheck(rows, lease)
            for rows, lease in zip((tables[0], broken, tables[2]), leases, strict=True)
        ],
        replace(policy, batch_tokens=512),
        control_seed=1,
    )
    assert isinstance(found[1], Rejected) and found[1].code == "reject.malformed_proof"
    for place in (0, 2):
        together = found[place]
        assert not isinstance(together, Rejected)
        alone = recompute(tables[place], leases[place], policy, control_seed=1)
        for one, other in zip(alone, together, strict=True):
            same(one, other)


def cpu_out_of_memory() -> Exception:
    """Returns what torch raises on a CPU."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60)
    return raised.value


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("another process took it"), cpu_out_of_memory()])
def test_rows_that_do_not_fit_together_are_checked_in_smaller_pieces(
    policy: LoadedPolicy, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    lease = make_lease(SPEC, prompts=3)
    rows = make_table(lease, policy).rows
    expected = recompute(rows, lease, policy, control_seed=1)
    start, sizes = recomputing._start_batch, list[int]()

    def short_of_memory(policy: LoadedPolicy, batch: list[_Entry], control_seed: int) -> Any:
        sizes.append(len(batch))
        if len(batch) > 2:
            raise error
        return start(policy, batch, control_seed)

    monkeypatch.setattr(recomputing, "_start_batch", short_of_memory)
    for one, other in zip(expected, recompute(rows, lease, policy, control_seed=1), strict=True):
        same(one, other)
    assert sizes[0] == len(rows) and min(sizes) <= 2

    monkeypatch.setattr(recomputing, "_start_batch", start)
    finish = recomputing._finish_batch

    def short_at_the_end(started: Any, control_seed: int, *, skip: Any) -> Any:
        if len(started.batch) > 2:
            raise error
        return finish(started, control_seed, skip=skip)

    monkeypatch.setattr(recomputing, "_finish_batch", short_at_the_end)
    small = replace(policy, batch_tokens=200)  # several batches, of which two are in memory at once
    for one, other in zip(expected, recompute(rows, lease, small, control_seed=1), strict=True):
        same(one, other)

    def never(*_: object, **__: object) -> Any:
        raise error

    monkeypatch.setattr(recomputing, "_finish_batch", never)
    with pytest.raises(CannotCheck, match="out of memory for a row of"):
        recompute(rows, lease, policy, control_seed=1)
    monkeypatch.setattr(recomputing, "_start_batch", never)
    with pytest.raises(CannotCheck, match="out of memory for a row of"):
        recompute(rows, lease, policy, control_seed=1)
