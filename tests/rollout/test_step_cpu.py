"""The CPU step: rows and prompts shared among threads, and how many threads torch uses in and around them."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from threading import Event, Timer, current_thread

import pytest
import torch

from shoal.model.builtin import create_model
from shoal.rollout.engine import step_cpu
from shoal.rollout.engine.api import FinishedRow, GenerationRequest
from shoal.rollout.engine.cpu_threads import MIN_ROWS, CoreThreads, split_rows
from shoal.rollout.engine.prompt_cache import MIN_PROMPT_TOKENS, batch_by_length, split_prompts
from shoal.rollout.engine.step_cpu import run_layers, scripted_layers
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.wire.run_spec import ProofSpec


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Sets two torch threads for one test."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_each_thread_uses_one_core_and_torch_keeps_its_setting() -> None:
    threads = CoreThreads()
    assert (threads.num, torch.get_num_threads()) == (2, 2)
    seen = threads.run([lambda: (torch.get_num_threads(), current_thread().name)] * 6)
    assert {num for num, _ in seen} == {1}
    assert all(name.startswith("core") for _, name in seen)
    assert threads.run([torch.get_num_threads]) == [2]  # a single job has all threads


@pytest.mark.usefixtures("two_threads")
def test_an_error_in_a_thread_is_raised_when_all_jobs_have_ended() -> None:
    failed, ended = Event(), []

    def slow() -> None:
        assert failed.wait(60)
        ended.append(True)

    Timer(0.1, failed.set).start()
    with pytest.raises(ZeroDivisionError):
        CoreThreads().run([lambda: 1 // 0, slow])
    assert ended


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_row_has_one_thread(num_threads: int) -> None:
    for num_rows in (1, MIN_ROWS, 2 * MIN_ROWS - 1, 2 * MIN_ROWS, 33):
        shares = split_rows(num_rows, num_threads)
        assert list(chain(*shares)) == list(range(num_rows))
        assert len(shares) <= num_threads
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        assert len(shares) == 1 or min(sizes) >= MIN_ROWS


def test_prompts_are_split_where_one_thread_would_have_most_of_them() -> None:
    prompts = [tuple(range(at, at + MIN_PROMPT_TOKENS)) for at in range(4)]
    assert split_prompts([prompts], 1) == [prompts]
    assert split_prompts([prompts], 2) == [prompts[:2], prompts[2:]]
    assert split_prompts([[(1,), (2,)]], 2) == [[(1,), (2,)]]  # too few tokens to split
    short, long = [(1,) * 80, (2,) * 80], [(3,) * 200]
    assert split_prompts([short, long], 2) == [long, short]  # the largest first


def test_prompts_of_similar_length_share_a_batch() -> None:
    short, middle, long = (1,) * 20, (1,) * 41, (1,) * 90
    assert batch_by_length([long, short, middle]) == [[short, middle], [long]]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_threads_and_torchscript_change_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compute_dtype: str
) -> None:
    folder = tmp_path / "model"
    create_model("tiny", folder, seed=3)
    with_threads = _generate(folder, compute_dtype)
    assert scripted_layers() is not run_layers
    monkeypatch.setattr(step_cpu, "scripted_layers", lambda: run_layers)
    assert _generate(folder, compute_dtype) == with_threads
    torch.set_num_threads(1)
    alone = _generate(folder, compute_dtype)
    if compute_dtype == "float32":  # in bfloat16 one rounding difference changes the rest of a row
        assert {row: done.output_tokens for row, done in alone.items()} == {
            row: done.output_tokens for row, done in with_threads.items()
        }


def _generate(folder: Path, compute_dtype: str) -> dict[GenerationRequest, FinishedRow]:
    engine = TorchEngine(compute_dtype=compute_dtype, proof=ProofSpec(), max_rows=3 * MIN_ROWS)  # type: ignore[arg-type]
    engine.load(folder, 0)
    engine.submit(
        [
            GenerationRequest(
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
    done: dict[GenerationRequest, FinishedRow] = {}
    while engine.has_work:
        done |= {row.request: row for row in engine.step()}
    return done
