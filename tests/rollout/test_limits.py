"""The limits of a worker really limit: cores, memory, disk, bandwidth."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch
from small_run import CONFIG, eventually, small_run

from shoal.files import folder_bytes, free_cgroup_bytes, is_out_of_memory
from shoal.net.rate_limit import BandwidthLimit
from shoal.rollout.engine.api import Behaviour, GenerationRequest
from shoal.rollout.engine.selection import AutoEngine, machine_capabilities
from shoal.rollout.engine.transformers_engine import TransformersEngine
from shoal.rollout.worker.limits import ResourceLimits
from shoal.rollout.worker.session import LeaseLost
from shoal.rollout.worker.version_cache import VersionCache
from shoal.rollout.worker.worker import WorkerConfig, run_worker
from shoal.wire.lease import Lease, PolicyRef
from shoal.wire.run_spec import ProofSpec

if TYPE_CHECKING:
    from shoal.rollout.engine.api import Engine
    from shoal.rollout.worker.worker_folder import WorkerFolder
    from shoal.wire.manifest import Manifest


class FakeTime:
    def __init__(self) -> None:
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_bandwidth_limit_is_kept_over_all_threads() -> None:
    fake = FakeTime()
    limit = BandwidthLimit(1000.0, clock=fake.clock, sleep=fake.sleep)
    for _ in range(50):
        limit.wait(100)
    assert fake.now_s == pytest.approx(5.0)
    fake.now_s = 100.0  # an idle time is not saved up
    limit.wait(1000)
    assert fake.now_s == pytest.approx(101.0)


def test_pieces_are_small_on_slow_links() -> None:
    assert BandwidthLimit(1e6 / 8).piece_bytes < 10_000
    assert BandwidthLimit(1e9).piece_bytes == 256 << 10


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


def test_cores_are_limited_for_the_whole_process() -> None:
    program = "import os; from shoal.rollout.worker.limits import limit_cores; print(limit_cores(1), len(os.sched_getaffinity(0)))"
    assert run_python(program).stdout.split() == ["1", "1"]
    assert len(os.sched_getaffinity(0)) >= 1


def test_the_kernel_refuses_more_memory() -> None:
    program = (
        "from shoal.files import is_out_of_memory\n"
        "from shoal.rollout.worker.limits import limit_memory\n"
        "limit_memory(0.5, 'cpu')\n"
        "try: kept = bytearray(600_000_000)\n"
        "except MemoryError as error: print('refused', is_out_of_memory(error))\n"
        "kept = bytearray(50_000_000); print('small is fine')\n"
    )
    assert run_python(program).stdout == "refused True\nsmall is fine\n"


def test_free_memory_is_what_a_limit_leaves() -> None:
    program = (
        "from shoal.files import free_data_bytes, free_memory_bytes\n"
        "from shoal.rollout.worker.limits import limit_memory\n"
        "print(free_data_bytes())\n"
        "limit_memory(0.5, 'cpu')\n"
        "before = free_memory_bytes(); kept = bytearray(200_000_000)\n"
        "print(0 < before < 500_000_000, 190_000_000 < before - free_memory_bytes() < 210_000_000)\n"
    )
    assert run_python(program).stdout == "None\nTrue True\n"


@pytest.mark.parametrize(
    ("line", "group", "names"),
    [
        ("0::/box", "box", ("memory.max", "memory.current", "inactive_file")),
        ("0::/not/seen/from/here", "", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:memory:/box\n0::/",
            "memory/box",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_free_memory_is_what_a_container_leaves(
    tmp_path: Path, line: str, group: str, names: tuple[str, str, str]
) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    folder = root / group
    folder.mkdir(parents=True)
    own.write_text(line + "\n")
    assert free_cgroup_bytes(own, root) is None
    (folder / names[0]).write_text("max\n")
    (folder / names[1]).write_text("700\n")
    (folder / "memory.stat").write_text(f"anon 400\n{names[2]} 250\n")
    assert free_cgroup_bytes(own, root) is None
    (folder / names[0]).write_text("1000\n")
    assert free_cgroup_bytes(own, root) == 550
    assert free_cgroup_bytes(tmp_path / "missing", root) is None


def test_words_of_torch_for_too_little_memory() -> None:
    assert is_out_of_memory(
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")
    )
    assert not is_out_of_memory(RuntimeError("shapes differ"))


def test_a_limit_of_memory_is_what_the_machine_offers() -> None:
    assert machine_capabilities("cpu", memory_gb=0.25).memory_gb == 0.25
    assert machine_capabilities("cpu", memory_gb=1e6).memory_gb < 1e6


def test_files_that_are_linked_count_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100_000))
    os.link(tmp_path / "a", tmp_path / "b")
    assert 100_000 <= folder_bytes(tmp_path) < 150_000


def test_apple_silicon_gets_the_engine_that_runs_there(tmp_path: Path) -> None:
    """Only the choice: no such machine was there to run it."""
    from shoal.model.builtin import create_model

    create_model("tiny", tmp_path / "v0", seed=0)
    chosen = AutoEngine(compute_dtype="float32", proof=ProofSpec(), max_rows=2, device="mps")
    assert chosen.policy_version is None
    engine = chosen._choose(tmp_path / "v0")
    assert isinstance(engine, TransformersEngine)
    assert engine._exact_device == torch.device("cpu")
    assert machine_capabilities("mps").device == "cpu"


def test_a_worker_keeps_its_limits_of_disk_and_bandwidth(tmp_path: Path) -> None:
    with small_run(tmp_path / "run", CONFIG) as run:
        run.publish(0)
        run.start_relay()
        eventually("a relay that serves", lambda: any(0 in relay.versions for relay in run.stats().relays))
        run.start_validator()
        size = folder_bytes(run.folder / "relay")
        limits = ResourceLimits(disk_gb=2.5 * size / 1e9, download_mbit=size * 8 / 1e6, upload_mbit=10.0)
        config = WorkerConfig(coordinator=run.url, dir=tmp_path / "node", limits=limits)
        stop, ends = threading.Event(), []
        began_s = time.monotonic()
        thread = threading.Thread(target=lambda: ends.append(run_worker(config, stop=stop)))
        thread.start()
        try:
            eventually("an accepted lease", lambda: any(node.accepted for node in run.stats().nodes))
            # The rate allows one version a second; it may take longer, never less.
            assert time.monotonic() - began_s > 0.9
            assert (tmp_path / "node" / "status.json").exists()
            run.publish(1)
            eventually("version 1", lambda: (tmp_path / "node" / "versions" / "v1").exists())
            assert folder_bytes(tmp_path / "node" / "versions") <= 2.5 * size
        finally:
            stop.set()
            thread.join(60)


def cache_with(folder: Path, *, max_bytes: int) -> VersionCache:
    cache = VersionCache.__new__(VersionCache)
    cache._folders, cache._max_lag, cache._max_bytes = {}, 2, max_bytes
    cache._worker_folder = cast("WorkerFolder", SimpleNamespace(versions=folder))
    return cache


def test_older_versions_make_room_for_a_new_one(tmp_path: Path) -> None:
    for version in range(1, 5):
        folder = tmp_path / f"v{version}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(100_000))
    cache = cache_with(tmp_path, max_bytes=350_000)
    cache._make_room(cast("Manifest", SimpleNamespace(version=5, num_bytes=100_000)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v3", "v4"]
    with pytest.raises(ValueError, match="two versions do not fit"):
        cache._make_room(cast("Manifest", SimpleNamespace(version=5, num_bytes=300_000)))
    assert (tmp_path / "v4").exists()


def test_an_interrupted_download_counts_once_and_older_ones_make_room(tmp_path: Path) -> None:
    for name, num_bytes in (("v4", 100_000), ("v3.partial", 80_000), ("v5.partial", 80_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".model.safetensors.partial").write_bytes(bytes(num_bytes))
    cache = cache_with(tmp_path, max_bytes=220_000)
    cache._make_room(cast("Manifest", SimpleNamespace(version=5, num_bytes=100_000)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v4", "v5.partial"]


def test_a_version_that_is_here_after_a_restart_fits(tmp_path: Path) -> None:
    (tmp_path / "v5").mkdir()
    (tmp_path / "v5" / "model.safetensors").write_bytes(bytes(100_000))
    cache = cache_with(tmp_path, max_bytes=150_000)
    cache._make_room(cast("Manifest", SimpleNamespace(version=5, num_bytes=100_000)))
    assert (tmp_path / "v5").exists()


def test_before_the_first_version_an_interrupted_download_of_another_one_makes_room(tmp_path: Path) -> None:
    (tmp_path / "v3.partial").mkdir()
    (tmp_path / "v3.partial" / ".model.safetensors.partial").write_bytes(bytes(80_000))
    cache = cache_with(tmp_path, max_bytes=150_000)
    cache._make_room(cast("Manifest", SimpleNamespace(version=5, num_bytes=100_000)))
    assert list(tmp_path.iterdir()) == []


class DeletedMeanwhile:
    """An engine whose folder is deleted while it loads: a newer version needed the space, or the owner deleted it."""

    def load(self, folder: Path, version: int) -> None:
        shutil.rmtree(folder)
        raise FileNotFoundError(folder / "model.safetensors")


def test_a_version_that_is_deleted_while_it_is_loaded_loses_only_the_lease(tmp_path: Path) -> None:
    policy = PolicyRef(version=1, weights_digest="ab" * 32)
    (tmp_path / "v1").mkdir()
    cache = VersionCache.__new__(VersionCache)
    cache._folders = {policy: tmp_path / "v1"}
    for known in (cache._folders, {}):  # with {}, another thread has deleted it before the engine began
        cache._folders = known
        with pytest.raises(LeaseLost, match="version 1 was deleted while it was loaded") as lost:
            cache.load(policy, cast("Engine", DeletedMeanwhile()))
        assert lost.value.still_open


def test_a_limit_that_no_version_fits_into_ends_the_worker(tmp_path: Path) -> None:
    with small_run(tmp_path / "run", CONFIG) as run:
        run.publish(0)
        run.serve_from_origin()
        eventually("a relay", lambda: any(0 in relay.versions for relay in run.stats().relays))
        config = WorkerConfig(
            coordinator=run.url, dir=tmp_path / "node", limits=ResourceLimits(disk_gb=0.0001)
        )
        with pytest.raises(ValueError, match=r"do not fit into --disk-gb 0.0001; join again with at least"):
            run_worker(config, stop=threading.Event())


class PausedByItsOwner(Behaviour):
    """The owner pauses at once while the first lease is generated."""

    def __init__(self, folder: Path) -> None:
        self.flag = folder / "paused"

    def requests(self, requests: Sequence[GenerationRequest], lease: Lease) -> Sequence[GenerationRequest]:
        self.flag.write_text("now")
        return requests


def test_a_pause_at_once_gives_the_lease_back(tmp_path: Path) -> None:
    with small_run(tmp_path / "run", CONFIG) as run:
        run.publish(0)
        run.serve_from_origin()
        eventually("a relay", lambda: any(0 in relay.versions for relay in run.stats().relays))
        config = WorkerConfig(coordinator=run.url, dir=tmp_path / "node")
        stop, behaviour = threading.Event(), PausedByItsOwner(tmp_path / "node")
        thread = threading.Thread(target=lambda: run_worker(config, stop=stop, behaviour=behaviour))
        thread.start()
        try:
            eventually("the pause", lambda: any("paused" in node.phase for node in run.stats().nodes))
            assert run.stats().open_leases == 0 and not run.events("submission.received")
        finally:
            stop.set()
            thread.join(60)
