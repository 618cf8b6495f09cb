"""Weights of 8 bits in a bfloat16 run that calibrated itself: refused, while honest workers of the same run are believed."""

import re
from pathlib import Path

import pytest
from swarm_processes import Swarm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LARGE_LEASES = {
    "samples_per_prompt": 16,
    "groups_per_step": 16,
    "prompts_per_lease": 8,
    "lease_s": 120.0,
    "claim_s": 60.0,
    "heartbeat_s": 3.0,
}
"""Rounding to 8 bits is a small difference: it shows in many rows."""


def test_weights_of_8_bits_are_refused_and_honest_work_is_not(tmp_path: Path) -> None:
    swarm = Swarm(
        tmp_path,
        last_version=100_000,  # ends with the test
        relays=1,
        workers=2,
        lies=["int8-weights"],
        deadline_s=300.0,
        settings=LARGE_LEASES,
    )
    text = swarm.file.read_text().replace('model = "tiny"', 'model = "tiny"\ncompute_dtype = "bfloat16"')
    swarm.file.write_text(text)
    with swarm:
        swarm.wait_for(
            "the worker with weights of 8 bits to be ejected",
            lambda: bool(re.search(r"lies: int8-weights \(\w+\) ejected", swarm.output)),
            deadline_s=300.0,
        )
        assert re.search(r"calibrated in \d+ s", swarm.output)
        swarm.wait_for_version(4, deadline_s=120.0)
        events = swarm.ledger()
    assert not re.search(r"worker-\d+ \(\w+\) (refused|ejected)", swarm.output)
    refused = {event.body["lease_id"] for event in events if event.body.get("code", "").startswith("reject.")}
    batches = [event for event in events if event.type == "batch.formed"]
    trained = {group.split("-")[0] for event in batches for group in event.body["group_ids"]}
    assert len(refused) >= 2 and trained and not refused & trained
