"""A whole swarm that trains adapters: workers and validators fetch them as adapters and merge what the trainer announced."""

import threading
from pathlib import Path

import pytest
from swarm_processes import Swarm

from shoal.diloco.ranks import SINGLE_PROCESS
from shoal.model.builtin import copy_all_but_weights, create_model
from shoal.model.tokenizer import load_tokenizer
from shoal.model.weights import WEIGHTS_FILE, save_tensors
from shoal.shardcast.manifest_files import read_manifest, version_folders
from shoal.telemetry import Log
from shoal.trainer.config import TrainerConfig
from shoal.trainer.distributed.lockstep import Lockstep
from shoal.wire.run_spec import TaskSpec

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
TASK = TaskSpec(name="sort", options={"length": 4, "partial": 0.5})


def make_warm_model(folder: Path) -> Path:
    """Writes a tiny model that earns some reward: adapters are added to the model that the run begins with."""
    create_model("tiny", folder / "raw", seed=0)
    config = TrainerConfig(supervised_steps=25, row_tokens=64, rows_per_micro_batch=32)
    lockstep = Lockstep(config, SINGLE_PROCESS, device="cpu", log=Log("warm"), stop=threading.Event())
    lockstep.create_learner(folder / "raw")
    lockstep.warm_up((TASK,), load_tokenizer(folder / "raw"))
    (folder / "warm").mkdir()
    copy_all_but_weights(folder / "raw", folder / "warm")
    save_tensors(lockstep.learner.decoder.named_parameters(), folder / "warm" / WEIGHTS_FILE)
    return folder / "warm"


def test_a_swarm_that_sends_adapters(tmp_path: Path) -> None:
    settings = {
        "model": str(make_warm_model(tmp_path)),
        "supervised_steps": 0,
        "learning_rate": 1e-3,
    }
    swarm = Swarm(tmp_path, last_version=4, workers=1, settings=settings)
    swarm.file.write_text(swarm.file.read_text().replace("[trainer]\n", "[trainer]\nlora_rank = 2\n"))
    with swarm:
        assert swarm.wait_until_over() == 0, swarm.output
    manifests = {}
    for path in version_folders(swarm.folder / "trainer" / "versions").values():
        sealed = read_manifest(path)
        if sealed is not None:
            manifests[sealed.body.version] = sealed.body
    newest = manifests[4]
    assert newest.base == 0
    assert newest.follow_bytes < manifests[0].payload_bytes / 8
    fetched = read_manifest(swarm.folder / "worker-1" / "versions" / "v4")
    assert fetched is not None
    assert fetched.body.weights_digest == newest.weights_digest
    assert "refused" not in swarm.log("trainer")
