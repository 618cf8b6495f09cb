"""Two processes give the losses and weights of one, however rows are packed; a lost rank ends the others."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rank_worker
import torch
from small_coordinator import SmallCoordinator
from tiny_learner import make_batch, make_learner, save

from shoal.diloco.ranks import SINGLE_PROCESS, Ranks
from shoal.model.builtin import create_model
from shoal.model.decoder import Decoder
from shoal.model.load_model import load_decoder
from shoal.telemetry import Log
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.pack import pack, pack_for_rank
from shoal.trainer.distributed.lockstep import Lockstep
from shoal.trainer.io.checkpoint import Checkpoints
from shoal.trainer.io.load_checkpoint import load_checkpoint
from shoal.wire.keys import Key

# Three processes import torch, which takes long on a slow machine.
pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
PLAIN: dict[str, Any] = {
    "learning_rate": 1e-3,
    "warmup_steps": 2,
    "row_tokens": 48,
    "rows_per_micro_batch": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "one-row": PLAIN | {"row_tokens": 500, "rows_per_micro_batch": 1},  # the second rank gets no samples
    "narrow": PLAIN | {"row_tokens": 24, "rows_per_micro_batch": 1, "activation_checkpointing": True},
    "bfloat16": PLAIN | {"compute_dtype": "bfloat16"},
    "lora": PLAIN | {"lora_rank": 4, "learning_rate": 1e-2},
    "lora-bfloat16": PLAIN | {"lora_rank": 4, "learning_rate": 1e-2, "compute_dtype": "bfloat16"},
    "int8": PLAIN | {"optimizer_states": "int8"},
    "gpt_neox": PLAIN,
}


def torchrun(
    *arguments: str, size: int = 2, where: tuple[str, ...] = ("--standalone",)
) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": f"{SOURCE}:{HERE}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *where, f"--nproc-per-node={size}"]
    return subprocess.Popen(
        [*command, *arguments], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def ended(process: subprocess.Popen[str], within_s: float = 300) -> str:
    """Waits until the process ends by itself and returns its log."""
    try:
        return process.communicate(timeout=within_s)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[Any, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "configs.json").write_text(json.dumps(CONFIGS))
    make_other_model(folder / "gpt_neox.model")
    learner = make_learner(model, TrainerConfig(**PLAIN))
    learner.step(make_batch(0), threading.Event())
    save(Checkpoints(folder / "single", keep=2, log=Log("trainer")), learner, None)
    process = torchrun(str(HERE / "rank_worker.py"), str(model), str(folder))
    rank_worker.main(str(model), str(folder))  # a single process, in parallel
    log = ended(process)
    assert process.returncode == 0, log
    found: dict[Any, Any] = {
        (name, size): torch.load(folder / f"{name}-{size}.pt", weights_only=True)
        for name in CONFIGS
        for size in (1, 2)
    }
    return found | {"lost": (folder / "lost.txt").read_text(), "folder": folder}


def make_other_model(folder: Path) -> None:
    """Creates a model of a family that only transformers implements."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 80, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("gpt_neox", **sizes, intermediate_size=96, initializer_range=0.1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder.with_suffix(".theirs"))
    create_model(str(folder.with_suffix(".theirs")), folder, seed=0)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_two_ranks_make_the_losses_and_weights_of_one(name: str, results: dict[Any, Any]) -> None:
    one, two = results[name, 1], results[name, 2]
    # The order of sums differs, which matters in bfloat16 and hardly in float32.
    loose = 5e-2 if "bfloat16" in name or name == "int8" else 1e-4
    # Adam moves a weight whose gradient is only rounding noise by a full step in each of three steps.
    atol = 2e-5 if loose == 1e-4 else max(5e-3, 3 * CONFIGS[name]["learning_rate"])
    torch.testing.assert_close(
        torch.tensor(two["figures"]), torch.tensor(one["figures"]), rtol=loose, atol=loose / 10
    )
    assert one["weights"].keys() == two["weights"].keys()
    for key, weight in two["weights"].items():
        if key.endswith("query_key_value.bias"):
            continue  # the gradient of a key bias is only rounding noise, which Adam scales to a full step
        torch.testing.assert_close(weight, one["weights"][key], rtol=loose, atol=atol)
    assert one["published"].keys() == two["published"].keys()
    for key, tensor in two["published"].items():
        # Nearly equal weights may be rounded to neighbours in bfloat16.
        torch.testing.assert_close(tensor, one["published"][key], rtol=2**-7, atol=max(5e-3, atol))


def test_four_ranks_on_two_nodes_make_the_losses_of_one(
    results: dict[Any, Any], model: Path, tmp_path: Path
) -> None:
    (tmp_path / "configs.json").write_text(json.dumps({"plain": PLAIN}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = [
        torchrun(
            *(str(HERE / "rank_worker.py"), str(model), str(tmp_path)),
            where=("--nnodes=2", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"),
        )
        for node in range(2)
    ]
    logs = [ended(node) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], logs
    four = torch.load(tmp_path / "plain-4.pt", weights_only=True)
    one = results["plain", 1]
    torch.testing.assert_close(
        torch.tensor(four["figures"]), torch.tensor(one["figures"]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", ["one-row", "narrow"])
def test_packing_does_not_change_the_result_on_two_ranks(name: str, results: dict[Any, Any]) -> None:
    plain, other = results["plain", 1], results[name, 2]
    torch.testing.assert_close(
        torch.tensor(other["figures"]), torch.tensor(plain["figures"]), rtol=1e-4, atol=1e-5
    )
    for key, weight in other["weights"].items():
        torch.testing.assert_close(weight, plain["weights"][key], rtol=1e-4, atol=2e-5)


def test_one_process_continues_from_the_checkpoint_of_two(results: dict[Any, Any], model: Path) -> None:
    checkpoint = Checkpoints(results["folder"] / "plain-2", keep=2, log=Log("trainer")).newest()
    assert checkpoint is not None
    lockstep = Lockstep(
        TrainerConfig(**PLAIN), SINGLE_PROCESS, device="cpu", log=Log("trainer"), stop=threading.Event()
    )
    lockstep.create_learner(model)
    lockstep.load_checkpoint(checkpoint)
    found = [lockstep.step(make_batch(version)) for version in (1, 2)]
    expected = results["plain", 1]["figures"][1:]
    assert [one.loss for one in found] == pytest.approx([one[0] for one in expected], rel=1e-4, abs=1e-5)
    assert [one.grad_norm for one in found] == pytest.approx([one[1] for one in expected], rel=1e-4)


def test_two_processes_continue_from_the_checkpoint_of_one(results: dict[Any, Any]) -> None:
    losses = json.loads((results["folder"] / "continued-2.json").read_text())
    assert losses == pytest.approx([one[0] for one in results["plain", 1]["figures"][1:]], rel=1e-4, abs=1e-5)


def sharded_checkpoints(results: dict[Any, Any], folder: Path) -> Checkpoints:
    shutil.copytree(results["folder"] / "plain-2", folder)
    return Checkpoints(folder, keep=2, log=Log("trainer"))


def test_each_rank_writes_its_own_shards(results: dict[Any, Any], tmp_path: Path) -> None:
    checkpoint = sharded_checkpoints(results, tmp_path / "copy").newest()
    assert checkpoint is not None
    assert checkpoint.format == "shoal/sharded-checkpoint/1"
    files = {
        str(path.relative_to(checkpoint.folder)) for path in checkpoint.folder.rglob("*") if path.is_file()
    }
    shards = {"shards/.metadata", "shards/__0_0.distcp", "shards/__1_0.distcp"}
    assert files == shards | {"optimizer.pt", "state.json", "manifest.json"}


def test_a_checkpoint_without_a_shard_is_skipped(
    results: dict[Any, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = sharded_checkpoints(results, tmp_path / "copy")
    (tmp_path / "copy" / "v000001" / "shards" / "__1_0.distcp").unlink()
    assert kept.newest() is None
    assert "shards/__1_0.distcp is missing" in caplog.text


def test_shards_of_another_model_are_refused(results: dict[Any, Any], tmp_path: Path, model: Path) -> None:
    checkpoint = sharded_checkpoints(results, tmp_path / "copy").newest()
    assert checkpoint is not None
    other = make_learner(model)
    assert isinstance(other.decoder, Decoder)
    other.decoder.model.layers = other.decoder.model.layers[:1]
    with pytest.raises(ValueError, match="holds another model than the run file names"):
        load_checkpoint(other, checkpoint)


def test_the_others_raise_rank_lost_if_a_rank_dies_in_a_step(results: dict[Any, Any]) -> None:
    assert results["lost"].startswith("RankLost: ")
    assert "another rank has ended or did not answer in time (" in results["lost"]
    assert "they continue from the last checkpoint" in results["lost"]


def test_a_single_process_gets_all_micro_batches() -> None:
    samples = make_batch(0).samples
    ours = pack_for_rank(samples, SINGLE_PROCESS, row_tokens=48, rows_per_micro_batch=2)
    assert len(ours) == len(pack(samples, row_tokens=48, rows_per_micro_batch=2))
    assert Ranks().leads


def test_an_empty_micro_batch_has_tokens_but_no_outputs() -> None:
    (micro,) = pack(make_batch(0).samples, row_tokens=500, rows_per_micro_batch=1)
    empty = micro.without_outputs()
    assert empty.tokens_BT.shape == (1, 2)
    assert empty.targets_N.numel() == empty.advantages_N.numel() == 0


# A process group of one process, whose threads have the same names.
RELEASE = """
from pathlib import Path

import torch.distributed as dist

from shoal.diloco.ranks import Ranks

def num_threads():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("pt_gloo_runloop")

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ranks = Ranks(0, 2, None, dist.new_group(), dist.new_group())
ranks.broadcast("a command")
ranks.wait_for_all()
ranks.leave()
assert num_threads() > 0
ranks.release()
assert num_threads() == 0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc")
def test_released_groups_have_no_threads_left() -> None:
    """One that still holds a tensor while Python exits aborts the process, and torchrun reports a finished run as failed."""
    command = [sys.executable, "-c", RELEASE]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# -- the whole trainer ------------------------------------------------------------------------------------


class Folder:
    """A run file and keys for the command line."""

    def __init__(self, folder: Path, coordinator: SmallCoordinator) -> None:
        (folder / "keys").mkdir()
        coordinator.trainer_key = Key.load_or_create(folder / "keys" / "trainer.key")
        coordinator.run_key = Key.load_or_create(folder / "keys" / "run.key")
        (folder / "run.toml").write_text(
            f"""
[run]
name = "test"
model = "tiny"
last_version = {coordinator.spec.last_version}

[task]
name = "sort"
options = {{ length = 3 }}

[sampling]
max_new_tokens = 5
samples_per_prompt = 4

[coordinator]
groups_per_step = 3

[trainer]
supervised_steps = 2
row_tokens = 32
rows_per_micro_batch = 2
"""
        )
        self.arguments = [
            *("-m", "shoal", "trainer", str(folder / "run.toml"), "--keys", str(folder / "keys")),
            *("--coordinator", coordinator.url, "--dir", str(folder / "trainer")),
            *("--port", "0", "--deadline-s", "60", "--threads", "1"),
        ]


@pytest.fixture
def coordinator() -> Iterator[SmallCoordinator]:
    with SmallCoordinator(last_version=2).serving() as serving:
        yield serving


def wait_until(condition: Any, process: subprocess.Popen[str]) -> None:
    for _ in range(900):
        if condition():
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.1)
    raise AssertionError("the condition did not become true within 90 s")


@pytest.mark.e2e
def test_torchrun_trains_and_publishes_from_rank_0(tmp_path: Path, coordinator: SmallCoordinator) -> None:
    process = torchrun(*Folder(tmp_path, coordinator).arguments)
    log = ended(process)
    assert process.returncode == 0, log
    assert [told.manifest.body.version for told in coordinator.announced] == [0, 1, 2]
    assert log.count("version announced") == 3
    assert "rank 0 is done  rank=1 reason=finished" in log
    decoder = load_decoder(tmp_path / "trainer" / "versions" / "v2")
    assert all(parameter.isfinite().all() for parameter in decoder.parameters())


@pytest.mark.e2e
@pytest.mark.parametrize("victim", ["all", "1"])
def test_a_stop_or_a_lost_rank_ends_all_and_the_same_command_continues(
    tmp_path: Path, coordinator: SmallCoordinator, victim: str
) -> None:
    coordinator.has_rollouts = False
    folder = Folder(tmp_path, coordinator)
    process = torchrun(*folder.arguments)
    wait_until(lambda: coordinator.announced, process)
    if victim == "all":
        process.send_signal(signal.SIGTERM)
    else:
        os.kill(pid_of_rank(process.pid, victim), signal.SIGKILL)
    log = ended(process)
    assert process.returncode != 0
    assert "stopped" in log
    coordinator.has_rollouts = True
    again = torchrun(*folder.arguments)
    log = ended(again)
    assert again.returncode == 0, log
    assert sorted(coordinator.digests()) == [0, 1, 2]


def pid_of_rank(parent: int, rank: str) -> int:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (entry / "stat").exists():
            stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if int(stat[1]) == parent and f"RANK={rank}\0".encode() in (entry / "environ").read_bytes():
                return int(entry.name)
    raise AssertionError(f"no child of {parent} is rank {rank}")
