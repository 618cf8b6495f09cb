"""Weights of 8 bits in a bfloat16 run that calibrated itself: refused, while honest workers of the same run are believed."""

import re
from pathlib import Path

import pytest
from swarm_processes import calibrated_swarm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_weights_of_8_bits_are_refused_and_honest_work_is_not(tmp_path: Path) -> None:
    swarm = calibrated_swarm(tmp_path, workers=2, lies=["int8-weights"])
    with swarm:
        swarm.wait_for(
            "the worker with weights of 8 bits to be ejected",
            lambda: bool(re.search(r"lies: int8-weights \(\w+\) ejected", swarm.output)),
            deadline_s=300.0,
        )
        assert re.search(r"calibrated in \d+ s", swarm.output)
        swarm.wait_for_version(4, deadline_s=120.0)
        verdicts, trained = swarm.verdicts(), swarm.trained_leases()
    assert not re.search(r"worker-\d+ \(\w+\) (refused|ejected)", swarm.output)
    refused = {verdict["lease_id"] for verdict in verdicts if verdict["code"].startswith("reject.")}
    assert len(refused) >= 2 and trained and not refused & trained
