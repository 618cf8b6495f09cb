"""Sites of several ranks: they train like sites of one rank, all ranks have the same bits, and a lost rank ends the site."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from local_swarm import in_threads, make_peer
from safetensors.torch import load_file

from shoal.diloco import LocalHub
from shoal.diloco.site.diloco_file import load_diloco_file
from shoal.diloco.site.site import Site

pytestmark = [pytest.mark.timeout(600)]

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
RUN = """
[run]
name = "ranks"
model = "tiny"
steps = 8
engine = "{engine}"
[data]
files = ["{text}"]
sequence = 12
[inner]
lr = 1e-2
warmup_steps = 1
batch = 5
micro_batch = 2
[rounds]
inner_steps = 4
fragments = {fragments}
codec = "fp32"
deadline_s = 120.0
min_peers = 2
"""


def write_run(folder: Path, engine: str, *, fragments: int = 2) -> Path:
    (folder / "text.txt").write_text("3141592653=1234569\n" * 200)
    path = folder / "run.toml"
    path.write_text(RUN.format(engine=engine, text=folder / "text.txt", fragments=fragments))
    return path


def torchrun(*arguments: str, size: int = 2) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": f"{SOURCE}:{HERE}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    return subprocess.Popen(
        [*command, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(process: "subprocess.Popen[str]") -> str:
    try:
        return process.communicate(timeout=300)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def one_rank_sites(path: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Trains two sites of one rank in this process and returns their common weights."""
    file, hub = load_diloco_file(path), LocalHub()
    sites = [
        Site(
            file,
            make_peer(hub, min_peers=2),
            folder=folder / name,
            device="cpu",
            peer=name,
            stop=threading.Event(),
        )
        for name in ("one", "two")
    ]
    for site in sites:
        site.optimizer.join(deadline_s=30)  # a site that joins late takes fewer steps
    in_threads([functools.partial(site.train, join_s=30) for site in sites])
    in_threads([site.close for site in sites])
    return {name: one.detach() for name, one in sites[0].model.named_parameters()}


@pytest.mark.integration
def test_a_site_of_two_ranks_trains_like_one_of_a_single_rank(tmp_path: Path) -> None:
    path = write_run(tmp_path, "local")
    process = torchrun(str(HERE / "site_rank_worker.py"), str(path), str(tmp_path))
    alone = one_rank_sites(path, tmp_path / "alone")
    log = ended(process)
    assert process.returncode == 0, log
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in range(2)]
    assert all(torch.equal(value, ranks[1][name]) for name, value in ranks[0].items()), "ranks differ"
    for name, value in alone.items():
        assert torch.allclose(ranks[0][name], value, atol=1e-4), name
    assert (tmp_path / "one" / "model").is_dir()
    assert len(list((tmp_path / "one").glob("metrics*"))) == 1, "rank 0 alone writes metrics"


@pytest.mark.integration
def test_a_lost_rank_ends_the_site_with_the_remedy(tmp_path: Path) -> None:
    process = torchrun(
        str(HERE / "site_rank_worker.py"), str(write_run(tmp_path, "local")), str(tmp_path), "die"
    )
    log = ended(process)
    assert process.returncode != 0, log
    lost = (tmp_path / "lost.txt").read_text()
    assert "another rank has ended" in lost
    assert "continue from the last checkpoint" in lost


@pytest.mark.hivemind
def test_two_sites_of_two_ranks_by_the_command_line(tmp_path: Path) -> None:
    """Four processes in two simulated nodes, merged by real Hivemind peers, end with the same weights.

    They are not compared with sites of one rank: how many steps the first site makes before the second joins depends on time.
    """
    pytest.importorskip("hivemind", reason="the extra `hivemind` is not installed: make hivemind")
    from shoal.diloco.transport.hivemind_mesh import peer_id

    path = write_run(tmp_path, "hivemind", fragments=1)  # so that the last round merges the whole model
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "site.id").write_text(f"{name}\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_id(tmp_path / 'one' / 'peer.key')}"
    train = ("-m", "shoal", "diloco", "train", str(path), "--dir")
    sites = [
        torchrun(*train, str(tmp_path / "one"), "--port", str(port)),
        torchrun(*train, str(tmp_path / "two"), "--join", address),
    ]
    logs = [ended(site) for site in sites]
    assert [site.returncode for site in sites] == [0, 0], "\n".join(logs)
    found = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two")]
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items()), "sites differ"
    for name in ("one", "two"):
        events = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        last = [event for event in events if event["event"] == "round"][-1]
        assert (last["outcome"], last["peers"]) == ("committed", 2)
