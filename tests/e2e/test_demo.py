"""What a newcomer sees: a swarm that learns, a liar that is caught, a summary, a plot; and an exit code that means it."""

import json
import re
from pathlib import Path

import pytest
from books import check_books, read_steps
from swarm_processes import Swarm, shoal

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LEARNS = {
    "samples_per_prompt": 16,
    "groups_per_step": 16,
    "prompts_per_lease": 8,
    "learning_rate": 5e-4,
    "supervised_steps": 25,
    "rows_per_micro_batch": 64,
    "eval_prompts": 64,
    "eval_samples": 4,
    "lease_s": 120.0,
    "heartbeat_s": 3.0,
}
"""Runs runs/demo.toml with a fifth of its steps."""


def expect(swarm: Swarm, gain: float) -> None:
    with swarm.file.open("a") as file:
        file.write(f"expect_gain = {gain}\n")


def test_a_swarm_that_learns_and_catches_a_liar(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, last_version=24, lies=["wrong-weights"], settings=LEARNS)
    expect(swarm, 0.02)
    with swarm:
        assert swarm.wait_until_over() == 0, swarm.output
    seen = swarm.output
    assert re.search(
        r"version \d+/24(, about .* left)?  reward 0\.\d{3}( \(all \d+ accepted: 0\.\d{3}\))?  train [\d,]+ tok/s  lag \d\.\d \(max \d\)  generate [\d,]+ tok/s"
        r"  accepted \d+  refused \d+  void \d+",
        seen,
    )
    liar = r"worker-3, lies: wrong-weights \([0-9a-f]{8}\)"
    refusal = r"the proofs do not match the leased model on these tokens \[reject.wrong_computation: "
    assert re.search(f"{liar} refused: {refusal}", seen)
    assert re.search(f"{liar} ejected after 2 refusals; the refused work is not trained on", seen)
    assert not re.search(r"worker-[12] \(\w+\) (refused|ejected)", seen)
    assert "held-out reward of version 0: " in seen and "held-out reward of version 24: " in seen

    summary = seen[seen.index("run e2e: as expected") :]
    for line in (
        r"held-out reward   0\.\d{3} \(version 0\) -> 0\.\d{3} \(version 24\), expected a gain of 0.02",
        r"versions          25 published, 384 groups trained on in 24 batches",
        r"broadcast         [\d.]+ MB published, [\d.]+ MB sent by relays",
        r"submissions       \d+ accepted, 2 refused, \d+ void",
        rf"{liar} ejected +credit +0 +accepted 0, refused 2, void \d+",
        r"worker-1 \(\w{8}\) +trusted +credit +[\d,]+ +accepted \d+, refused 0",
        r"worker-2 \(\w{8}\) +trusted +credit +[\d,]+ +accepted \d+, refused 0",
        rf"files             {swarm.folder}",
        rf"plot              {swarm.folder}/reward.png",
    ):
        assert re.search(rf"(?m)^  {line}", summary), f"{line!r} is not in\n{summary}"
    # Little work is wasted: 3 in 10 groups became stale before leases were limited to what the trainer can still use.
    counted = re.search(r"of (\d+) groups\), (\d+) groups stale", summary)
    assert counted is not None
    assert int(counted.group(2)) < int(counted.group(1)) / 5
    assert (swarm.folder / "reward.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [step["version"] for step in read_steps(swarm.folder)] == list(range(1, 25))
    assert not swarm.processes()
    check_books(swarm)


def test_the_exit_code_when_it_did_not_learn_enough(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, last_version=2, relays=1, workers=1)
    expect(swarm, 0.99)
    with swarm:
        assert swarm.wait_until_over() == 1, swarm.output
    assert "run e2e: held-out reward did not rise by the expected margin" in swarm.output
    assert "expected a gain of 0.99" in swarm.output


def test_an_unknown_key_and_an_invalid_value_are_errors(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, settings={"groups_per_step": 0, "lease_s": "long"})
    swarm.file.write_text(swarm.file.read_text() + "colour = 1\n[weather]\n")
    refused = shoal("run", str(swarm.file), "--dir", str(swarm.folder))
    assert refused.returncode == 2
    for words in (
        f"{swarm.file}: coordinator.groups_per_step = 0: ",
        f"{swarm.file}: coordinator.lease_s = 'long': ",
        f"{swarm.file}: local.colour is not a key of a run file; `shoal docs run-file` lists them",
        f"{swarm.file}: weather is not a key of a run file",
    ):
        assert words in refused.stderr, refused.stderr
    assert not swarm.folder.exists()
    assert json.dumps(refused.stdout) == '""'
