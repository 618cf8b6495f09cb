"""The scheduler: which rows run in which slot and blocks, where prompts are stored, how many blocks fit into memory."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.files import free_memory_bytes
from shoal.model.shape import Rope, Shape
from shoal.rollout.engine.api import GenerationRequest
from shoal.rollout.engine.block_pool import BLOCK, BlockPool, PromptPlaces, blocks_for
from shoal.rollout.engine.prompt_cache import PromptBatch, PromptCache
from shoal.rollout.engine.scheduler import (
    GROW_STEPS,
    Admission,
    CacheSize,
    Scheduler,
    block_bytes,
    cache_size_for,
    fit_blocks,
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
    return CacheSize(
        rows=rows,
        row_positions=128,
        new_tokens=64,
        prompts=8,
        prompt_positions=128,
        blocks=64,
        least_blocks=2,
    )


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
        removed += [row.request.prompt_index for row in scheduler.remove(sorted(slots))]
        if gapless:
            before = dict(scheduler.running)
            for source, target in scheduler.compact(step=0):
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


def test_an_end_reported_before_a_row_was_moved_belongs_to_the_previous_row() -> None:
    scheduler = make_scheduler(2)
    scheduler.submit([request(0), request(1)])
    scheduler.admit({PROMPT}, step=0)
    scheduler.remove([0])
    assert scheduler.compact(step=7) == [(1, 0)]
    assert scheduler.finished([0, 1], step=6) == []
    assert scheduler.finished([0, 1], step=7) == [0]
    assert [row.fed(9) for row in scheduler.running.values()] == [1], "it was fed since it started"


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
        (batches[0], [[1, 1], [3, 6]]),
        (batches[1], [[0], [5]]),
    ]


# -- places of prompts --------------------------------------------------------------------------------------


def test_prompts_that_rows_will_start_from_are_kept() -> None:
    places = PromptPlaces(BlockPool(8), 3)
    places.place([(1,), (2,)])
    placed = places.place([(3,)], keep={(2,)})
    assert (placed.added, placed.freed) == ({(3,): 0}, [0])
    assert places._place[(2,)] == 1
    assert places.place([(1,), (4,)], keep={(3,)}).added == {(1,): 1, (4,): 2}


@given(st.lists(st.integers(0, 5), max_size=60), st.data())
def test_a_prompt_keeps_its_place_while_rows_use_it(numbers: list[int], data: st.DataObject) -> None:
    places = PromptPlaces(BlockPool(8), 4)
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
            assert not added and places._place[prompt] == held[prompt]
        held[prompt] = places._place[prompt]
        assert places.acquire(prompt) == held[prompt]
        running.append(prompt)
        assert len({places._place[one] for one in running}) == len(set(running))


# -- memory -------------------------------------------------------------------------------------------------

LONG = replace(request(0, (1,) * 100), max_new_tokens=50)


def test_the_cache_holds_the_longest_row() -> None:
    requests = [LONG, replace(LONG, prompt_tokens=(1,) * 10, max_new_tokens=300)]
    # Prompts take no positions in the slots: two that run and two computed ahead are stored apart.
    size = cache_size_for(requests, 7, computed_prompts=64)
    assert size == CacheSize(7, 384, 300, 4, 128, blocks=7 * 3 + 4 + 7, least_blocks=4)


def test_memory_limits_how_many_blocks_there_are() -> None:
    size = cache_size_for([LONG], 100, computed_prompts=16)
    block, row = block_bytes(SHAPE, 4), 40 * 2 * 128 + 50 * 20
    assert block == 2 * 2 * 2 * 32 * 4 * BLOCK

    def fit(budget_bytes: int) -> CacheSize:
        return fit_blocks(SHAPE, size, value_bytes=4, state_tokens=40, budget_bytes=budget_bytes)

    assert fit(1000 * (block + row)) == size
    assert fit(100 * row + 50 * block).blocks == 50
    assert fit(60 * row + 9 * block).rows < 100  # states and tokens leave half of the budget to the blocks
    with pytest.raises(ValueError, match="lower max_new_tokens or free memory"):
        fit(row + block)
    assert free_memory_bytes() > 0


# -- blocks -------------------------------------------------------------------------------------------------


def test_scheduler_and_blocks_need_no_torch() -> None:
    code = "import sys, shoal.rollout.engine.scheduler; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 12))
def test_no_block_is_given_twice(takes: list[int], num_blocks: int) -> None:
    pool = BlockPool(num_blocks)
    taken: list[list[int]] = []
    for num in takes:
        if num <= pool.num_free and num:
            taken.append(pool.take(num))
        elif taken:
            pool.give_back(taken.pop(0))
        flat = [block for blocks in taken for block in blocks]
        assert len(set(flat)) == len(flat) == num_blocks - pool.num_free


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 300), st.data()), min_size=1, max_size=9),
    spare=st.integers(0, 6),
    max_rows=st.integers(1, 5),
)
def test_every_row_ends_however_few_blocks_there_are(
    lengths: list[tuple[int, int, st.DataObject]], spare: int, max_rows: int
) -> None:
    """Runs the scheduler as the engine does, with rows that end anywhere. No two rows or prompts ever share a block."""
    prompts = [tuple(range(at, at + 60 * (at + 1))) for at in range(4)]
    rows = [
        replace(request(index, prompts[which]), max_new_tokens=most)
        for index, (which, most, _) in enumerate(lengths)
    ]
    stops = {
        row.prompt_index: data.draw(st.integers(1, most))
        for row, (_, most, data) in zip(rows, lengths, strict=True)
    }
    scheduler = Scheduler(max_rows)
    size = cache_size_for(rows, max_rows, computed_prompts=2)
    scheduler.resize(size._replace(blocks=min(size.blocks, size.least_blocks + spare)))
    scheduler.submit(rows)
    ended: list[int] = []
    ready: set[tuple[int, ...]] = set()
    step = 0
    while scheduler.waiting or scheduler.running:
        assert step < 20_000, "rows preempt each other for ever"
        if scheduler.waiting and scheduler.waiting[0].prompt_tokens not in ready:
            placed, _ = scheduler.place_prompts(scheduler.next_prompts(max_tokens=200, max_prompts=2))
            ready = set(placed)
        scheduler.admit(ready, step=step)
        if step % GROW_STEPS == 0:
            while scheduler.grow(step=step) is None:
                ready = set()
                if not scheduler.places.evict():
                    scheduler.preempt()
        _check_blocks(scheduler, step)
        done = [
            slot
            for slot, row in scheduler.running.items()
            if row.fed(step + 1) >= stops[row.request.prompt_index] - 1
        ]
        ended += [row.request.prompt_index for row in scheduler.remove(done)]
        step += 1
    assert sorted(ended) == list(range(len(rows)))
    scheduler.places.evict()
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


def _check_blocks(scheduler: Scheduler, step: int) -> None:
    """Checks that running rows have a block for the token that they are fed in `step`, and that no block is used twice."""
    rows = scheduler.running.values()
    used = [block for row in rows for block in row.blocks]
    used += [block for blocks in scheduler.places._blocks.values() for block in blocks]
    assert len(set(used)) == len(used) == scheduler.pool.num_blocks - scheduler.pool.num_free
    assert all(len(row.blocks) >= blocks_for(row.fed(step + 1)) for row in rows)


def test_the_row_that_started_last_is_preempted_and_starts_again_first() -> None:
    scheduler = make_scheduler(4)
    scheduler.submit([request(index) for index in range(3)])
    scheduler.admit({PROMPT}, step=0)
    assert [scheduler.preempt()[0] for _ in range(2)] == [2, 1]
    assert [row.prompt_index for row in scheduler.waiting] == [1, 2]
    assert [row.slot for row in scheduler.admit({PROMPT}, step=5)] == [1, 2]


def test_a_restart_keeps_every_row() -> None:
    scheduler = make_scheduler(3)
    scheduler.submit([request(index) for index in range(5)])
    scheduler.admit({PROMPT}, step=0)
    scheduler.restart()
    assert [row.prompt_index for row in scheduler.waiting] == list(range(5))
    assert scheduler.pool.num_blocks == scheduler.num_free == scheduler.num_running == 0
