"""Rows and prompts shared out among lanes; what torch's threads are in them, and around them."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from threading import current_thread

import pytest
import torch

from shoal.model.builtin import create_model
from shoal.rollout.engine import step_cpu
from shoal.rollout.engine.api import Finished, Request
from shoal.rollout.engine.cpu_layers import step_layers, without_python
from shoal.rollout.engine.cpu_threads import Lanes
from shoal.rollout.engine.step_cpu import MIN_PROMPT_TOKENS, MIN_ROWS, share_prompts, share_rows
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.wire.run_spec import ProofSpec


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Whatever the machine has; the tests around this one keep theirs."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_lanes_have_a_thread_each_and_leave_torch_its_own() -> None:
    lanes = Lanes()
    assert (lanes.num, torch.get_num_threads()) == (2, 2)
    seen = lanes.run([lambda: (torch.get_num_threads(), current_thread().name)] * 6)
    assert {threads for threads, _ in seen} == {1}
    assert all(name.startswith("lane") for _, name in seen)
    assert lanes.run([torch.get_num_threads]) == [2]  # alone, it has them all


@pytest.mark.usefixtures("two_threads")
def test_what_fails_in_a_lane_fails_here() -> None:
    with pytest.raises(ZeroDivisionError):
        Lanes().run([lambda: 1, lambda: 1 // 0])


@pytest.mark.parametrize("num_lanes", [1, 2, 5])
def test_every_row_has_one_lane(num_lanes: int) -> None:
    for num_rows in (1, MIN_ROWS, 2 * MIN_ROWS - 1, 2 * MIN_ROWS, 33):
        shares = share_rows(num_rows, num_lanes)
        assert list(chain(*shares)) == list(range(num_rows))
        assert len(shares) <= num_lanes
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        assert len(shares) == 1 or min(sizes) >= MIN_ROWS


def test_prompts_are_divided_where_one_lane_would_have_most_of_them() -> None:
    prompts = [tuple(range(at, at + MIN_PROMPT_TOKENS)) for at in range(4)]
    assert share_prompts([prompts], 1) == [prompts]
    assert share_prompts([prompts], 2) == [prompts[:2], prompts[2:]]
    assert share_prompts([[(1,), (2,)]], 2) == [[(1,), (2,)]]  # too few to divide
    short, long = [(1,) * 80, (2,) * 80], [(3,) * 200]
    assert share_prompts([short, long], 2) == [long, short]  # the longest first


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_lanes_and_torchs_interpreter_change_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compute_dtype: str
) -> None:
    folder = tmp_path / "model"
    create_model("tiny", folder, seed=3)
    with_lanes = _generate(folder, compute_dtype)
    assert without_python() is not step_layers
    monkeypatch.setattr(step_cpu, "without_python", lambda: step_layers)
    assert _generate(folder, compute_dtype) == with_lanes
    torch.set_num_threads(1)
    alone = _generate(folder, compute_dtype)
    if compute_dtype == "float32":  # two bfloat16 computations may part for good where they round apart
        assert {row: done.output_tokens for row, done in alone.items()} == {
            row: done.output_tokens for row, done in with_lanes.items()
        }


def _generate(folder: Path, compute_dtype: str) -> dict[Request, Finished]:
    engine = TorchEngine(compute_dtype=compute_dtype, proof=ProofSpec(), max_rows=3 * MIN_ROWS)  # type: ignore[arg-type]
    engine.load(folder, 0)
    engine.submit(
        [
            Request(
                prompt_index=index % 3,
                sample_index=index,
                prompt_tokens=tuple(range(3, 20 + index % 3)),
                sample_seed=index,
                max_new_tokens=3 + index % 7,
                temperature=1.0,
            )
            for index in range(5 * MIN_ROWS)
        ]
    )
    done: dict[Request, Finished] = {}
    while engine.has_work:
        done |= {row.request: row for row in engine.step()}
    return done
