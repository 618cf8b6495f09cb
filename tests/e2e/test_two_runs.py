"""Two runs of different models on one coordinator: nodes go where they fit, and each run keeps its own ledger."""

import functools
import json
from pathlib import Path

import httpx2
import pytest
from roles import Roles, free_port, run_file
from safetensors.torch import load_file, save_file
from swarm_processes import read_ledger

from shoal.model.builtin import create_model
from shoal.wire.ledger import verify_chain
from shoal.wire.messages import RunList

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def shallow_model(folder: Path) -> Path:
    """Writes a second tiny model: the first without its last layer."""
    create_model("tiny", folder, 1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: one for name, one in weights.items() if ".layers.1." not in name}, folder / "model.safetensors"
    )
    return folder


def is_served(url: str) -> bool:
    return httpx2.get(url).is_success


def test_nodes_work_for_the_run_they_fit(tmp_path: Path) -> None:
    small = run_file(tmp_path / "small.toml", "small")
    big = run_file(tmp_path / "big.toml", "big", model=str(shallow_model(tmp_path / "shallow")))
    big.write_text(big.read_text() + "[needs]\nmemory_gb = 900000\n")
    url = f"http://127.0.0.1:{(port := free_port())}"

    def keys_of(name: str) -> Path:
        return tmp_path / "coordinator" / name / "keys"

    with Roles(tmp_path) as roles:
        roles.start("coordinator", "coordinator", big, small, "--port", port)
        roles.wait_until_up(url)
        runs = RunList.parse(httpx2.get(f"{url}/v1/runs").content).runs
        assert {run.run: run.path for run in runs} == {"big": "/runs/big", "small": "/runs/small"}
        # A machine that is told to join a run that it does not fit is refused with a reason, by `join` and by `worker`.
        unfit = roles.start("unfit", "join", url, "--yes", "--run", "big")
        stray = roles.start("stray", "worker", "--coordinator", f"{url}/runs/big")
        assert unfit.wait(200) != 0
        assert "900000 GB of memory" in roles.log("unfit")
        assert stray.wait(200) != 0
        assert "request.unfit" in roles.log("stray")
        roles.start_trainer(f"{url}/runs/big", big, keys_of("big"), name="big-")
        roles.start_crew(f"{url}/runs/small", small, keys_of("small"), name="small-")
        for name in ("small", "big"):
            latest = f"{url}/runs/{name}/v1/policies/latest"
            roles.wait_for(f"a version of {name}", functools.partial(is_served, latest))
        roles.wait_for("a relay", lambda: httpx2.get(f"{url}/runs/small/v1/stats").json()["relays"])
        # With only the coordinator's address it takes the run that it fits.
        worker = roles.start("worker", "join", url, "--yes", "--threads", "1")
        stats = roles.wait_until_finished(f"{url}/runs/small")
        assert worker.wait(200) == 0
        assert stats.submissions.get("accepted", 0) > 0
        assert "joins 'small'" in roles.log("worker")
        other = httpx2.get(f"{url}/runs/big/v1/stats").json()
        assert (other["newest_version"], other["submissions"]) == (0, {})
        for name in ("small", "big"):
            events = list(read_ledger(f"{url}/runs/{name}"))
            verify_chain(events)
            assert events[0].body["run"] == name
        # A path without a prefix belongs to the first run.
        assert httpx2.get(f"{url}/v1/info").json()["spec"]["run"] == "big"
        assert httpx2.get(f"{url}/runs/nobody/v1/info").status_code == 404
