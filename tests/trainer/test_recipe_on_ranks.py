"""Every part of the recipe gives the same result on two processes as on one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.integration

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
PLAIN = {"learning_rate": 1e-3, "warmup_steps": 2, "row_tokens": 48, "rows_per_micro_batch": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "report": PLAIN
    | {"normalisation": "sequence", "kl": 0.1, "entropy_bonus": 0.01, "behaviour": "recompute", "optimizer_steps": 2},
    "answers": PLAIN | {"loss": "gspo", "eps": 0.5, "eps_high": 2.0},
    "corrected": PLAIN
    | {"loss": "dr_grpo", "behaviour": "recompute", "correction": "mask", "correction_band": [0.3, 3.0]},
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[tuple[str, int], Any]:
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "configs.json").write_text(json.dumps(CONFIGS))
    environment = os.environ | {"PYTHONPATH": f"{SOURCE}:{HERE}", "OMP_NUM_THREADS": "1"}
    for size in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        ended = subprocess.run(
            [*command, str(HERE / "recipe_worker.py"), str(model), str(folder)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
    return {
        (name, size): torch.load(folder / f"{name}-{size}.pt", weights_only=True)
        for name in CONFIGS
        for size in (1, 2)
    }


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_two_ranks_give_the_figures_and_weights_of_one(name: str, results: dict[Any, Any]) -> None:
    one, two = results[name, 1], results[name, 2]
    for ours, theirs in zip(two["figures"], one["figures"], strict=True):
        for figure, value in theirs.items():
            if figure != "train_s":
                assert ours[figure] == pytest.approx(value, rel=1e-3, abs=1e-5), figure
    for key, weight in two["weights"].items():
        torch.testing.assert_close(weight, one["weights"][key], rtol=1e-4, atol=3e-5)


def test_the_reference_is_version_0(results: dict[Any, Any]) -> None:
    kls = [figures["kl"] for figures in results["report", 2]["figures"]]
    assert 0 < kls[0] < kls[1] < kls[2], "only the first update starts at version 0"
