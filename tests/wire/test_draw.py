"""The draw: docs/wire/draw.md is the standard, and the tests read its numbers from there."""

import hashlib
import hmac
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.wire import seeded_draw

DOC = Path(__file__).parents[2] / "docs" / "wire" / "draw.md"
MASK = 2**64 - 1


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    block = re.search(r"```json\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    numbers: dict[str, Any] = json.loads(block[1])
    return numbers


def splitmix64(seed: int, count: int) -> list[int]:
    """Yields the outputs of the textbook generator in plain integers."""
    state, outputs = seed, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        outputs.append(z ^ (z >> 31))
    return outputs


def token_of(weights: list[float], temperature: float, uniform: float) -> int:
    """Returns the last code block of the page."""
    powered = np.array([weight ** (1 / temperature) for weight in weights])
    cumulative = np.cumsum(powered / powered.sum())
    return int(np.flatnonzero(cumulative > uniform * cumulative[-1])[0])


def test_lease_seed(golden: dict[str, Any]) -> None:
    secret = bytes.fromhex(golden["epoch_secret"])
    assert seeded_draw.lease_seed(secret, golden["lease_id"], golden["node"]) == golden["lease_seed"]
    by_hand = hmac.new(secret, f"lease/{golden['lease_id']}/{golden['node']}".encode(), hashlib.sha256)
    assert by_hand.hexdigest() == golden["lease_seed"]


def test_prompt_and_sample_seeds(golden: dict[str, Any]) -> None:
    seed = golden["lease_seed"]
    for index, value in golden["prompt_seeds"].items():
        assert seeded_draw.prompt_seed(seed, int(index)) == value
    for pair, value in golden["sample_seeds"].items():
        prompt_index, sample_index = map(int, pair.split("/"))
        assert seeded_draw.sample_seed(seed, prompt_index, sample_index) == value


def test_train_problems_follow_the_lease_and_held_out_ones_do_not(golden: dict[str, Any]) -> None:
    seed, held_out = golden["lease_seed"], golden["eval_seeds"]
    train = seeded_draw.problem_seeds(seed, run="demo", purpose="train", chunk=0, num_prompts=2)
    assert train == [golden["prompt_seeds"]["0"], golden["prompt_seeds"]["1"]]
    for lease_seed in (seed, "00" * 32):
        seeds = seeded_draw.problem_seeds(
            lease_seed, run=held_out["run"], purpose="eval", chunk=held_out["chunk"], num_prompts=2
        )
        assert seeds == held_out["seeds"]


def test_uniforms(golden: dict[str, Any]) -> None:
    for seed, values in golden["uniforms"].items():
        positions = np.arange(len(values), dtype=np.uint64)
        got = seeded_draw.uniforms(np.array(int(seed), np.uint64), positions)
        assert [int(uniform * 2**53) for uniform in got] == values
        assert [output >> 11 for output in splitmix64(int(seed), len(values))] == values


def test_splitmix64_is_the_published_one() -> None:
    # The first outputs for seed 1234567, as other libraries print them.
    assert splitmix64(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_uniforms_broadcast_over_rows_and_positions() -> None:
    seeds = np.array([[3], [4]], np.uint64)
    table = seeded_draw.uniforms(seeds, np.arange(5, dtype=np.uint64))
    assert table.shape == (2, 5)
    assert table[1, 4] == seeded_draw.uniforms(np.array([4], np.uint64), np.array([4], np.uint64))[0]


def test_uniforms_are_uniform() -> None:
    seeds = np.array([seeded_draw.sample_seed("ab" * 32, 0, j) for j in range(100)], np.uint64)[:, None]
    table = seeded_draw.uniforms(seeds, np.arange(1000, dtype=np.uint64))
    assert table.min() >= 0
    assert table.max() < 1
    counts, _ = np.histogram(table, bins=20, range=(0, 1))
    chi_squared = ((counts - 5000) ** 2 / 5000).sum()
    assert (
        chi_squared < 43.8
    )  # 19 degrees of freedom: one fixed set in a thousand would fail, this one does not


def test_draws(golden: dict[str, Any]) -> None:
    for example in golden["draws"]:
        uniforms = seeded_draw.uniforms(
            np.array(example["sample_seed"], np.uint64), np.arange(12, dtype=np.uint64)
        )
        drawn = [token_of(example["weights"], example["temperature"], uniform) for uniform in uniforms]
        assert drawn == example["tokens"]
