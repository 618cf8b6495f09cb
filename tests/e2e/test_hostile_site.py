"""A DiLoCo site that sends NaN, against three real sites over Hivemind: it is left out, and the others train to one state."""

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import nan_site
import pytest
from safetensors.torch import load_file
from swarm_processes import SHOAL, Role

pytest.importorskip("hivemind", reason="the extra `hivemind` is not installed: make hivemind")
pytestmark = [pytest.mark.e2e, pytest.mark.hivemind, pytest.mark.timeout(600)]

ROUNDS = 4
SITE = """
[run]
name = "nan"
model = "tiny"
steps = {steps}
[data]
files = ["{text}"]
sequence = 16
[inner]
lr = 1e-3
warmup_steps = 2
batch = 4
micro_batch = 4
[rounds]
inner_steps = 2
min_peers = 3
gather_s = 60.0
deadline_s = 100.0
"""


def rounds_of(site: Path) -> list[dict[str, object]]:
    lines = map(json.loads, (site / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "round"]


def test_a_site_that_sends_nan_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the sea is wide and the fish are many; " * 200)
    file = tmp_path / "site.toml"
    file.write_text(SITE.format(steps=2 * ROUNDS, text=tmp_path / "text.txt"))
    folders = [tmp_path / name for name in ("a", "b", "c")]
    with contextlib.ExitStack() as running:

        def start(folder: Path, action: str, *words: str, command: Sequence[str] = tuple(SHOAL)) -> Role:
            folder.mkdir()
            return running.enter_context(
                Role(folder, "diloco", action, *words, "--dir", str(folder), command=command)
            )

        rendezvous = start(tmp_path / "rendezvous", "swarm", "--port", "0")
        rendezvous.wait_for_log("join: ")
        words = ("train", str(file), "--join", rendezvous.log.split("join: ")[1].split()[0])
        liar = start(tmp_path / "liar", *words, command=(sys.executable, nan_site.__file__))
        liar.wait_for_log("joined")
        sites = [start(folder, *words) for folder in folders]
        codes = [site.wait_until_over(300.0) for site in sites]
        assert codes == [0, 0, 0], [site.log[-3000:] for site in sites]
        assert nan_site.SENT in liar.log, liar.log[-3000:]
    assert any("its pseudo-gradient is not finite" in site.log for site in sites)
    rounds = [rounds_of(folder) for folder in folders]
    for of_site in rounds:
        assert [(one["outcome"], one["peers"]) for one in of_site] == [("committed", 3)] * ROUNDS
        assert [one["state"] for one in of_site] == [one["state"] for one in rounds[0]]
    for folder in folders:
        weights = load_file(folder / "model" / "model.safetensors")
        assert all(weight.isfinite().all() for weight in weights.values())
