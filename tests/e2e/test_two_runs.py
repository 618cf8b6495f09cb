"""Two runs of different models on one coordinator: nodes go where they fit, and each run keeps its own books."""

import json
from pathlib import Path

import httpx
import pytest
from roles import Roles, free_port, run_file
from safetensors.torch import load_file, save_file

from shoal.model.builtin import create_model
from shoal.wire.ledger import verify_chain
from shoal.wire.messages import RunList
from swarm import read_ledger

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def shallow_model(folder: Path) -> Path:
    """A second tiny model: the first without its last layer."""
    create_model("tiny", folder, 1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: one for name, one in weights.items() if ".layers.1." not in name}, folder / "model.safetensors"
    )
    return folder


def test_nodes_work_for_the_run_they_fit(tmp_path: Path) -> None:
    small = run_file(tmp_path / "small.toml", "small")
    big = run_file(tmp_path / "big.toml", "big", model=str(shallow_model(tmp_path / "shallow")))
    big.write_text(big.read_text() + "[needs]\nmemory_gb = 900000\n")
    url = f"http://127.0.0.1:{(port := free_port())}"
    with Roles(tmp_path) as roles:
        roles.start("coordinator", "coordinator", big, small, "--port", port)
        roles.wait_until_up(url)
        runs = RunList.parse(httpx.get(f"{url}/v1/runs").content).runs
        assert {run.run: run.path for run in runs} == {"big": "/runs/big", "small": "/runs/small"}
        for file in (small, big):
            name = file.stem
            keys = tmp_path / "coordinator" / name / "keys"
            roles.start_crew(f"{url}/runs/{name}", file, keys, name=f"{name}-")
        roles.wait_for(
            "both runs to have a version and a relay",
            lambda: all(
                httpx.get(f"{url}/runs/{name}/v1/policies/latest").is_success
                and httpx.get(f"{url}/runs/{name}/v1/stats").json()["relays"]
                for name in ("small", "big")
            ),
        )
        # Told nothing but the coordinator's address, it takes the run that it fits.
        worker = roles.start("worker", "join", url, "--yes", "--threads", "1")
        # Told to work for the other, it is refused in words.
        unfit = roles.start("unfit", "join", url, "--yes", "--run", "big")
        assert unfit.wait(150) != 0
        assert "900000 GB of memory" in roles.log("unfit")
        # And so is a worker that goes there without asking.
        stray = roles.start("stray", "worker", "--coordinator", f"{url}/runs/big")
        assert stray.wait(150) != 0
        assert "request.unfit" in roles.log("stray")
        stats = roles.wait_until_finished(f"{url}/runs/small")
        assert worker.wait(150) == 0
        assert stats.submissions.get("accepted", 0) > 0
        assert "takes 'small'" in roles.log("worker")
        other = httpx.get(f"{url}/runs/big/v1/stats").json()
        assert (other["newest_version"], other["submissions"]) == (0, {})
        for name in ("small", "big"):
            events = list(read_ledger(f"{url}/runs/{name}"))
            verify_chain(events)
            assert events[0].body["run"] == name
        # What has no prefix is the first run's, as ever.
        assert httpx.get(f"{url}/v1/info").json()["spec"]["run"] == "big"
        assert httpx.get(f"{url}/runs/nobody/v1/info").status_code == 404
