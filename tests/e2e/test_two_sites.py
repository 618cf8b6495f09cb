"""Two whole swarms whose trainers merge: both publish the same weights after a merge, and both learn."""

import contextlib
import json
import subprocess
from pathlib import Path

import pytest
from swarm_processes import SHOAL, Swarm

pytest.importorskip("hivemind", reason="the extra `hivemind` is not installed: make hivemind")
pytestmark = [pytest.mark.e2e, pytest.mark.hivemind, pytest.mark.timeout(900)]

DILOCO = """
[trainer.diloco]
inner_steps = 3
codec = "fp32"
deadline_s = 240.0
"""


def merges(swarm: Swarm) -> list[dict[str, object]]:
    lines = map(json.loads, (swarm.folder / "trainer" / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "merge"]


def address_of(rendezvous: "subprocess.Popen[str]") -> str:
    assert rendezvous.stdout is not None
    return rendezvous.stdout.readline().split()[1]


def test_two_sites_hold_the_same_weights_after_each_merge(tmp_path: Path) -> None:
    words = [*SHOAL, "diloco", "swarm", "--dir", str(tmp_path / "rendezvous"), "--port", "0"]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as rendezvous,
        contextlib.ExitStack() as running,
    ):
        running.callback(rendezvous.terminate)
        address = address_of(rendezvous)
        sites = [
            Swarm(tmp_path / name, last_version=6, relays=1, workers=1, deadline_s=400.0)
            for name in ("a", "b")
        ]
        for site in sites:
            site.file.write_text(site.file.read_text() + DILOCO)
            site.start("--peer-join", address)
            running.push(site)
        assert [site.wait_until_over(550.0) for site in sites] == [0, 0], [site.output for site in sites]
    # A site that starts late misses the first merges, and then merges once more alone: those of both sites are compared.
    first, second = ({line["round"]: line for line in merges(site) if line["sites"] == 2} for site in sites)
    assert first.keys() == second.keys() != set()
    for merge in (*first.values(), *second.values()):
        assert merge["outcome"] == "committed"
        assert merge["state"] == first[merge["round"]]["state"]
