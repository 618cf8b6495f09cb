"""How many rows fit, and where prompts stand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.model.shape import Shape
from shoal.rollout.engine.api import Request
from shoal.rollout.engine.attention_plan import Pieces, PieceSize
from shoal.rollout.engine.places import Places
from shoal.rollout.engine.scheduler import Room, fit, free_memory_bytes, room_for

SHAPE = Shape(
    vocab_size=100,
    hidden_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    ffn_size=256,
    rope_theta=1e4,
    norm_eps=1e-5,
    tied_embeddings=True,
    qkv_bias=False,
    qk_norm=False,
    max_positions=2048,
    eos_token_ids=(2,),
)
REQUEST = Request(
    prompt_index=0,
    sample_index=0,
    prompt_tokens=(1,) * 100,
    sample_seed=0,
    max_new_tokens=50,
    temperature=1.0,
)


def test_room_holds_the_longest_row() -> None:
    requests = [REQUEST, replace(REQUEST, prompt_tokens=(1,) * 10, max_new_tokens=300)]
    # Prompts take no place in the slots: two that run, two computed ahead.
    assert room_for(requests, 7, shelf_prompts=64) == Room(7, 384, 300, 4, 128)


def test_memory_decides_how_many_rows_run() -> None:
    room = room_for([REQUEST], 100, shelf_prompts=16)
    position = 2 * 2 * 2 * 32 * 4
    row, prompts = position * room.context + 50 * (2 * 128 + 20), 2 * position * 128
    assert fit(SHAPE, room, value_bytes=4, budget_bytes=1000 * row) == room
    assert fit(SHAPE, room, value_bytes=4, budget_bytes=prompts + 9 * row + 1).rows == 9
    with pytest.raises(ValueError, match="lower max_new_tokens or free memory"):
        fit(SHAPE, room, value_bytes=4, budget_bytes=prompts + row - 1)
    assert free_memory_bytes() > 0


def test_prompts_that_rows_will_start_from_stay() -> None:
    places = Places(3)
    places.seat([(1,), (2,)])
    assert places.seat([(3,)], keep={(2,)}) == {(3,): 0}
    assert places[(2,)] == 1
    assert places.seat([(1,), (4,)], keep={(3,)}) == {(1,): 1, (4,): 2}


@given(st.lists(st.integers(0, 5), max_size=60), st.data())
def test_a_prompt_stays_while_rows_run_from_it(numbers: list[int], data: st.DataObject) -> None:
    places = Places(4)
    running: list[tuple[int, ...]] = []
    held: dict[tuple[int, ...], int] = {}
    for number in numbers:
        prompt = (number,)
        while len(set(running) | {prompt}) > 3:
            gone = data.draw(st.sampled_from(running))
            running.remove(gone)
            places.leave([gone])
        seated = places.seat([prompt])
        assert seated.keys() <= {prompt}
        if prompt in running:
            assert not seated and places[prompt] == held[prompt]
        held[prompt] = places[prompt]
        places.enter([prompt])
        running.append(prompt)
        assert len({places[one] for one in running}) == len(set(running))


@given(
    st.dictionaries(st.integers(0, 11), st.tuples(st.integers(0, 3), st.booleans()), max_size=12),
    st.lists(st.integers(1, 70), min_size=4, max_size=4),
)
def test_every_row_looks_at_all_of_its_prompt_once(
    rows: dict[int, tuple[int, bool]], lengths: list[int]
) -> None:
    pieces = Pieces(12, 70, PieceSize(rows=3, positions=16))
    assert pieces.changed() is None
    pieces.enter(rows, [place for place, _ in rows.values()], [lengths[place] for place, _ in rows.values()])
    pieces.leave(gone := [slot for slot, (_, leaves) in rows.items() if leaves])
    table = pieces.changed()
    assert table is not None
    assert pieces.changed() is None
    order, items = table[1:13], table[13:].reshape(5, pieces.max_items)[:, : table[0]]
    seen = sorted(
        (int(slot), int(place), int(position))
        for first, count, place, begin, num in items.T
        for slot in order[first : first + count]
        for position in range(begin, begin + num)
    )
    assert seen == sorted(
        (slot, place, position)
        for slot, (place, _) in rows.items()
        if slot not in gone
        for position in range(lengths[place])
    )
    assert all(count <= 3 and num <= 16 and begin % 16 == 0 for _, count, _, begin, num in items.T)
