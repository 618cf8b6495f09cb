"""The scheduler: which rows run in which slot, where prompts are stored, how many rows fit into memory."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.model.shape import Rope, Shape
from shoal.rollout.engine.api import GenerationRequest
from shoal.rollout.engine.prompt_cache import FirstDraws, PromptBatch, PromptCache
from shoal.rollout.engine.scheduler import (
    Admission,
    CacheSize,
    PromptPlaces,
    Scheduler,
    cache_size_for,
    fit_rows,
    free_memory_bytes,
)

PROMPT = (1,)
SHAPE = Shape(
    vocab_size=100,
    hidden_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    ffn_size=256,
    rope=Rope(),
    norm_eps=1e-5,
    tied_embeddings=True,
    qkv_bias=False,
    qk_norm=False,
    max_positions=2048,
    eos_token_ids=(2,),
)


def request(index: int, prompt: tuple[int, ...] = PROMPT) -> GenerationRequest:
    return GenerationRequest(
        prompt_index=index,
        sample_index=0,
        prompt_tokens=prompt,
        sample_seed=index,
        max_new_tokens=index + 1,
        temperature=1.0,
    )


def make_scheduler(max_rows: int, *prompts: tuple[int, ...], num_slots: int | None = None) -> Scheduler:
    """Returns a scheduler whose prompts have places."""
    scheduler = Scheduler(max_rows)
    scheduler.resize(cache_size(max_rows if num_slots is None else num_slots))
    scheduler.places.place(prompts or [PROMPT])
    return scheduler


def cache_size(rows: int) -> CacheSize:
    return CacheSize(rows=rows, row_positions=128, new_tokens=64, prompts=8, prompt_positions=128)


# -- rows ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(0, 20), st.booleans(), st.data())
def test_rows_start_in_order_and_are_removed_once(
    max_rows: int, num: int, gapless: bool, data: st.DataObject
) -> None:
    scheduler = make_scheduler(max_rows)
    scheduler.submit([request(index) for index in range(num)])
    removed: list[int] = []
    admitted: list[int] = []
    while scheduler.waiting or scheduler.running:
        admitted += [row.request.prompt_index for row in scheduler.admit({PROMPT}, step=0)]
        assert scheduler.num_running + scheduler.num_free == max_rows
        slots = data.draw(st.sets(st.sampled_from(sorted(scheduler.running)), min_size=1))
        removed += [row.prompt_index for row in scheduler.remove(sorted(slots))]
        if gapless:
            before = dict(scheduler.running)
            for source, target in scheduler.compact():
                assert scheduler.running[target] == before[source]
            assert scheduler.end == scheduler.num_running
    assert admitted == list(range(num))
    assert sorted(removed) == list(range(num))


def test_rows_wait_for_their_prompts() -> None:
    scheduler = make_scheduler(4, (1,), (2,))
    scheduler.submit([request(0, (1,)), request(1, (2,)), request(2, (1,))])
    assert [row.slot for row in scheduler.admit({(1,)}, step=0)] == [0]
    admitted = scheduler.admit({(1,), (2,)}, step=0)
    assert [(row.request.prompt_index, row.prompt_place) for row in admitted] == [(1, 1), (2, 0)]


def test_an_end_reported_before_a_row_started_belongs_to_the_previous_row() -> None:
    scheduler = make_scheduler(2)
    scheduler.submit([request(0), request(1), request(2)])
    scheduler.admit({PROMPT}, step=0)
    assert scheduler.finished([0], step=4) == [0]
    scheduler.remove([0])
    assert [row.slot for row in scheduler.admit({PROMPT}, step=6)] == [0]
    assert scheduler.finished([0], step=5) == []
    assert scheduler.finished([0], step=6) == [0]


def test_new_slots_are_used_lowest_first() -> None:
    scheduler = make_scheduler(4, num_slots=1)
    scheduler.submit([request(index) for index in range(4)])
    assert [row.slot for row in scheduler.admit({PROMPT}, step=0)] == [0]
    scheduler.resize(cache_size(3))
    assert [row.slot for row in scheduler.admit({PROMPT}, step=2)] == [1, 2]
    assert scheduler.finished([0], step=1) == [0]  # reported when there was one slot


def test_each_prompt_is_computed_once() -> None:
    scheduler = Scheduler(4)
    scheduler.submit([request(0, (1, 2, 3)), request(1, (4,)), request(2, (1, 2, 3)), request(3, (5, 6))])
    assert scheduler.next_prompts(max_tokens=100, max_prompts=9) == [(1, 2, 3), (4,), (5, 6)]
    assert scheduler.next_prompts(max_tokens=4, max_prompts=9) == [(1, 2, 3), (4,)]
    assert scheduler.next_prompts(max_tokens=100, max_prompts=1) == [(1, 2, 3)]
    assert scheduler.next_prompts(max_tokens=1, max_prompts=9) == [(1, 2, 3)]
    assert scheduler.next_prompts(max_tokens=100, max_prompts=9, exclude={(4,)}) == [(1, 2, 3), (5, 6)]


def test_startable_prompts_end_at_the_first_row_that_must_wait() -> None:
    scheduler = Scheduler(4)
    prompts = [(1, 2, 3), (1, 2, 3), (4,), (5, 6), (7,)]
    scheduler.submit([request(index, prompt) for index, prompt in enumerate(prompts)])
    assert scheduler.startable_prompts({(1, 2, 3), (4,), (7,)}) == {(1, 2, 3), (4,)}
    assert scheduler.startable_prompts({(4,)}) == set()


def test_rows_draw_their_first_token_from_the_batch_of_their_prompt() -> None:
    cache = PromptCache()
    batches = [PromptBatch([(8,), (1,)], None, torch.empty(0)), PromptBatch([(2,)], None, torch.empty(0))]
    cache.replace(batches)
    admitted = [
        Admission(3, request(0, (1,)), 0),
        Admission(5, request(1, (2,)), 1),
        Admission(6, request(2, (1,)), 0),
    ]
    assert cache.first_draws(admitted) == [
        FirstDraws(batches[0], [1, 1], [3, 6]),
        FirstDraws(batches[1], [0], [5]),
    ]


# -- places of prompts --------------------------------------------------------------------------------------


def test_prompts_that_rows_will_start_from_are_kept() -> None:
    places = PromptPlaces(3)
    places.place([(1,), (2,)])
    placed = places.place([(3,)], keep={(2,)})
    assert (placed.added, placed.freed) == ({(3,): 0}, [0])
    assert places[(2,)] == 1
    assert places.place([(1,), (4,)], keep={(3,)}).added == {(1,): 1, (4,): 2}


@given(st.lists(st.integers(0, 5), max_size=60), st.data())
def test_a_prompt_keeps_its_place_while_rows_use_it(numbers: list[int], data: st.DataObject) -> None:
    places = PromptPlaces(4)
    running: list[tuple[int, ...]] = []
    held: dict[tuple[int, ...], int] = {}
    for number in numbers:
        prompt = (number,)
        while len(set(running) | {prompt}) > 3:
            removed = data.draw(st.sampled_from(running))
            running.remove(removed)
            places.release(removed)
        added = places.place([prompt]).added
        assert added.keys() <= {prompt}
        if prompt in running:
            assert not added and places[prompt] == held[prompt]
        held[prompt] = places[prompt]
        assert places.acquire(prompt) == held[prompt]
        running.append(prompt)
        assert len({places[one] for one in running}) == len(set(running))


# -- memory -------------------------------------------------------------------------------------------------

LONG = replace(request(0, (1,) * 100), max_new_tokens=50)


def test_the_cache_holds_the_longest_row() -> None:
    requests = [LONG, replace(LONG, prompt_tokens=(1,) * 10, max_new_tokens=300)]
    # Prompts take no positions in the slots: two that run and two computed ahead are stored apart.
    assert cache_size_for(requests, 7, computed_prompts=64) == CacheSize(7, 384, 300, 4, 128)


def test_memory_limits_how_many_rows_run() -> None:
    size = cache_size_for([LONG], 100, computed_prompts=16)
    position = 2 * 2 * 2 * 32 * 4
    row, prompts = position * size.row_positions + 50 * (2 * 128 + 20), 2 * position * 128
    assert fit_rows(SHAPE, size, value_bytes=4, budget_bytes=1000 * row) == size
    assert fit_rows(SHAPE, size, value_bytes=4, budget_bytes=prompts + 9 * row + 1).rows == 9
    with pytest.raises(ValueError, match="lower max_new_tokens or free memory"):
        fit_rows(SHAPE, size, value_bytes=4, budget_bytes=prompts + row - 1)
    assert free_memory_bytes() > 0
