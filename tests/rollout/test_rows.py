"""Slot bookkeeping: nothing lost, nobody seated twice, order kept among the waiting."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.rollout.engine.api import Request
from shoal.rollout.engine.rows import Rows, by_batch, length_batches, next_prompts, prompts_at_hand


def request(index: int, prompt: tuple[int, ...] = (1,)) -> Request:
    return Request(
        prompt_index=index,
        sample_index=0,
        prompt_tokens=prompt,
        sample_seed=index,
        max_new_tokens=index + 1,
        temperature=1.0,
    )


@given(st.integers(1, 6), st.integers(0, 20), st.booleans(), st.data())
def test_rows_come_in_order_and_leave_once(
    max_rows: int, num: int, gapless: bool, data: st.DataObject
) -> None:
    rows = Rows(max_rows)
    rows.open_slots(max_rows)
    rows.submit([request(index) for index in range(num)])
    left: list[int] = []
    admitted: list[int] = []
    while rows.waiting or rows.running:
        admitted += [new.prompt_index for new in rows.admit({(1,)}, step=0).values()]
        assert rows.num_running + rows.num_free == max_rows
        slots = data.draw(st.sets(st.sampled_from(sorted(rows.running)), min_size=1))
        left += [row.prompt_index for row in rows.remove(sorted(slots))]
        if gapless:
            before = dict(rows.running)
            for source, target in rows.compact():
                assert rows.running[target] == before[source]
            assert rows.end == rows.num_running
    assert admitted == list(range(num))
    assert sorted(left) == list(range(num))


def test_rows_wait_for_their_prompts() -> None:
    rows = Rows(4)
    rows.open_slots(4)
    rows.submit([request(0, (1,)), request(1, (2,)), request(2, (1,))])
    assert list(rows.admit({(1,)}, step=0)) == [0]
    assert [row.prompt_index for row in rows.admit({(1,), (2,)}, step=0).values()] == [1, 2]


def test_what_was_said_before_a_row_came_does_not_concern_it() -> None:
    rows = Rows(2)
    rows.open_slots(2)
    rows.submit([request(0), request(1), request(2)])
    rows.admit({(1,)}, step=0)
    assert rows.finished([0], step=4) == [0]
    rows.remove([0])
    assert list(rows.admit({(1,)}, step=6)) == [0]
    assert rows.finished([0], step=5) == []
    assert rows.finished([0], step=6) == [0]


def test_more_slots_are_taken_lowest_first() -> None:
    rows = Rows(4)
    rows.open_slots(1)
    rows.submit([request(index) for index in range(4)])
    assert list(rows.admit({(1,)}, step=0)) == [0]
    rows.open_slots(3)
    assert list(rows.admit({(1,)}, step=2)) == [1, 2]
    assert rows.finished([0], step=1) == [0]  # said when there was one slot


def test_each_prompt_is_computed_once() -> None:
    waiting = [request(0, (1, 2, 3)), request(1, (4,)), request(2, (1, 2, 3)), request(3, (5, 6))]
    assert next_prompts(waiting, max_tokens=100, max_prompts=9) == [(1, 2, 3), (4,), (5, 6)]
    assert next_prompts(waiting, max_tokens=4, max_prompts=9) == [(1, 2, 3), (4,)]
    assert next_prompts(waiting, max_tokens=100, max_prompts=1) == [(1, 2, 3)]
    assert next_prompts(waiting, max_tokens=1, max_prompts=9) == [(1, 2, 3)]
    assert next_prompts(waiting, max_tokens=100, max_prompts=9, but={(4,)}) == [(1, 2, 3), (5, 6)]


def test_prompts_at_hand_end_with_the_first_row_that_has_to_wait() -> None:
    waiting = [
        request(0, (1, 2, 3)),
        request(1, (1, 2, 3)),
        request(2, (4,)),
        request(3, (5, 6)),
        request(4, (7,)),
    ]
    assert prompts_at_hand(waiting, {(1, 2, 3), (4,), (7,)}) == {(1, 2, 3), (4,)}
    assert prompts_at_hand(waiting, {(4,)}) == set()


def test_prompts_of_about_one_length_go_together() -> None:
    short, middle, long = (1,) * 20, (1,) * 41, (1,) * 90
    assert length_batches([long, short, middle], 1.25) == [[short, middle], [long]]
    assert length_batches([long, short, middle], 8.0) == [[short, middle, long]]


def test_rows_start_from_where_their_prompts_are() -> None:
    admitted = {3: request(0, (1,)), 5: request(1, (2,)), 6: request(2, (1,))}
    assert by_batch(admitted, {(1,): (0, 7), (2,): (1, 0)}) == {0: [(7, 3), (7, 6)], 1: [(0, 5)]}
