"""Slot bookkeeping: no gaps, nothing lost, order kept among the waiting."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.rollout.engine import Request
from shoal.rollout.rows import Rows, distinct_prompts, prefill_batches


def request(index: int, prompt: tuple[int, ...] = (1,)) -> Request:
    return Request(
        prompt_index=index,
        sample_index=0,
        prompt_tokens=prompt,
        sample_seed=index,
        max_new_tokens=index + 1,
        temperature=1.0,
    )


@given(st.integers(1, 6), st.integers(0, 20), st.data())
def test_rows_come_in_order_leave_once_and_leave_no_gap(max_rows: int, num: int, data: st.DataObject) -> None:
    rows = Rows(max_rows)
    rows.submit([request(index) for index in range(num)])
    left: list[int] = []
    admitted: list[int] = []
    while rows.waiting or rows.running:
        admitted += [new.prompt_index for new in rows.admit()]
        slots = data.draw(st.sets(st.integers(0, rows.num_running - 1), min_size=1))
        left += [rows.running[slot].prompt_index for slot in slots]
        before = {slot: rows.running[slot] for slot in range(rows.num_running)}
        for source, target in rows.remove(sorted(slots)):
            assert rows.running[target] == before[source]
        for slot, row in enumerate(rows.running):
            assert rows.seeds_S[slot] == row.sample_seed
            assert rows.caps_S[slot] == row.max_new_tokens
    assert admitted == list(range(num))
    assert sorted(left) == list(range(num))


def test_samples_of_one_prompt_share_a_prefill() -> None:
    requests = [request(0, (1, 2, 3)), request(1, (4,)), request(2, (1, 2, 3))]
    assert distinct_prompts(requests) == {(4,): [1], (1, 2, 3): [0, 2]}


def test_prefill_batches_stay_within_their_tokens() -> None:
    prompts = [(1,), (1, 2), (1, 2, 3), (1,) * 9]
    assert prefill_batches(prompts, 6) == [[(1,), (1, 2)], [(1, 2, 3)], [(1,) * 9]]
