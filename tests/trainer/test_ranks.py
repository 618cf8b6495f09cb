"""Two processes are one: the same losses and weights, however rows are packed; and none is left waiting."""

import json
import os
import signal
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
from tiny_learner import make_batch

from shoal.model.builtin import create_model
from shoal.model.load_model import load_decoder
from shoal.telemetry import Log
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.pack import pack
from shoal.trainer.distributed.lockstep import Crew
from shoal.trainer.distributed.ranks import ALONE, Ranks, _nothing
from shoal.trainer.io.checkpoint import Checkpoints
from shoal.wire.keys import Key

pytestmark = pytest.mark.timeout(600)  # three processes that import torch, on whatever machine

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
PLAIN = {"learning_rate": 1e-3, "warmup_steps": 2, "row_tokens": 48, "rows_per_micro_batch": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "one-row": PLAIN | {"row_tokens": 500, "rows_per_micro_batch": 1},  # the second rank has nothing to do
    "narrow": PLAIN | {"row_tokens": 24, "rows_per_micro_batch": 1, "activation_checkpointing": True},
    "bfloat16": PLAIN | {"compute_dtype": "bfloat16"},
    "lora": PLAIN | {"lora_rank": 4, "learning_rate": 1e-2},
    "gpt_neox": PLAIN,
}


def torchrun(*arguments: str, size: int = 2) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": f"{SOURCE}:{HERE}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    return subprocess.Popen(
        [*command, *arguments], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def ended(process: subprocess.Popen[str], within_s: float = 300) -> str:
    """What it said, once it has ended by itself."""
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
    process = torchrun(str(HERE / "rank_worker.py"), str(model), str(folder))
    rank_worker.main(str(model), str(folder))  # rank 0 of 1, meanwhile
    said = ended(process)
    assert process.returncode == 0, said
    found: dict[Any, Any] = {
        (name, size): torch.load(folder / f"{name}-{size}.pt") for name in CONFIGS for size in (1, 2)
    }
    return found | {"lost": (folder / "lost.txt").read_text(), "folder": folder}


def make_other_model(folder: Path) -> None:
    """Of a family that only transformers knows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 80, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("gpt_neox", **sizes, intermediate_size=96, initializer_range=0.1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder.with_suffix(".theirs"))
    create_model(str(folder.with_suffix(".theirs")), folder, seed=0)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_two_ranks_make_the_losses_and_weights_of_one(name: str, results: dict[Any, Any]) -> None:
    one, two = results[name, 1], results[name, 2]
    # bfloat16 rounds sums that are made in another order; float32 hardly does.
    loose = 5e-2 if name == "bfloat16" else 1e-4
    torch.testing.assert_close(
        torch.tensor(two["figures"]), torch.tensor(one["figures"]), rtol=loose, atol=loose / 10
    )
    assert one["weights"].keys() == two["weights"].keys()
    for key, weight in two["weights"].items():
        if key.endswith("query_key_value.bias"):
            continue  # a bias of keys has no gradient but rounding, of which Adam makes a whole step
        torch.testing.assert_close(
            weight, one["weights"][key], rtol=loose, atol=5e-3 if loose > 1e-3 else 2e-5
        )


@pytest.mark.parametrize("name", ["one-row", "narrow"])
def test_packing_changes_nothing_on_any_number_of_ranks(name: str, results: dict[Any, Any]) -> None:
    plain, other = results["plain", 1], results[name, 2]
    torch.testing.assert_close(
        torch.tensor(other["figures"]), torch.tensor(plain["figures"]), rtol=1e-4, atol=1e-5
    )
    for key, weight in other["weights"].items():
        torch.testing.assert_close(weight, plain["weights"][key], rtol=1e-4, atol=2e-5)


def test_one_process_goes_on_from_the_checkpoint_of_two(results: dict[Any, Any], model: Path) -> None:
    checkpoint = Checkpoints(results["folder"] / "plain-2", keep=2, log=Log("trainer")).newest()
    assert checkpoint is not None
    crew = Crew(TrainerConfig(**PLAIN), ALONE, device="cpu", log=Log("trainer"), stop=threading.Event())
    crew.begin(model, 0.8)
    crew.resume(checkpoint)
    found = [crew.step(make_batch(version)) for version in (1, 2)]
    expected = results["plain", 1]["figures"][1:]
    assert [one.loss for one in found] == pytest.approx([one[0] for one in expected], rel=1e-4, abs=1e-5)
    assert [one.grad_norm for one in found] == pytest.approx([one[1] for one in expected], rel=1e-4)


def test_a_rank_that_dies_in_a_step_is_named_by_the_others(results: dict[Any, Any]) -> None:
    assert results["lost"].startswith("RankLost: ")
    assert "another rank has ended or did not come in time; its" in results["lost"]


def test_alone_all_micro_batches_are_ours() -> None:
    samples = make_batch(0).samples
    ours = ALONE.share(samples, row_tokens=48, rows_per_micro_batch=2)
    assert len(ours) == len(pack(samples, row_tokens=48, rows_per_micro_batch=2))
    assert Ranks().leads


def test_nothing_has_tokens_and_no_outputs() -> None:
    (micro,) = pack(make_batch(0).samples, row_tokens=500, rows_per_micro_batch=1)
    nothing = _nothing(micro)
    assert nothing.tokens_BT.shape == (1, 2)
    assert nothing.targets_N.numel() == nothing.advantages_N.numel() == 0


# -- the whole trainer ------------------------------------------------------------------------------------


class Folder:
    """A run file and keys, as the command line wants them."""

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
    raise AssertionError("it never came to that")


@pytest.mark.e2e
def test_torchrun_trains_and_publishes_from_rank_0(tmp_path: Path, coordinator: SmallCoordinator) -> None:
    process = torchrun(*Folder(tmp_path, coordinator).arguments)
    said = ended(process)
    assert process.returncode == 0, said
    assert [told.manifest.body.version for told in coordinator.announced] == [0, 1, 2]
    assert said.count("version announced") == 3
    assert "rank 0 is done  rank=1 reason=finished" in said
    decoder = load_decoder(tmp_path / "trainer" / "versions" / "v2")
    assert all(parameter.isfinite().all() for parameter in decoder.parameters())


@pytest.mark.e2e
@pytest.mark.parametrize("victim", ["all", "1"])
def test_a_stop_or_a_lost_rank_ends_all(tmp_path: Path, coordinator: SmallCoordinator, victim: str) -> None:
    coordinator.has_rollouts = False
    process = torchrun(*Folder(tmp_path, coordinator).arguments)
    wait_until(lambda: coordinator.announced, process)
    if victim == "all":
        process.send_signal(signal.SIGTERM)
    else:
        os.kill(pid_of_rank(process.pid, victim), signal.SIGKILL)
    said = ended(process)
    assert process.returncode != 0
    assert "stopped" in said


def pid_of_rank(parent: int, rank: str) -> int:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (entry / "stat").exists():
            stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if int(stat[1]) == parent and f"RANK={rank}\0".encode() in (entry / "environ").read_bytes():
                return int(entry.name)
    raise AssertionError(f"no child of {parent} is rank {rank}")
