"""/readyz fails when a loop stalls; /metrics has a bounded number of labels."""

import re
import time

from small_swarm import SmallSwarm

from shoal.swarm.coordinator.context import STALLED_S
from shoal.wire.messages import ProblemDetails


def test_ready_until_a_loop_stalls(swarm: SmallSwarm) -> None:
    swarm.coordinator.health.beat("housekeeping")
    assert swarm.public.get("/readyz").status_code == 200
    swarm.coordinator.health.loops["housekeeping"] = time.monotonic() - STALLED_S - 1
    answer = swarm.public.get("/readyz")
    assert (answer.status_code, ProblemDetails.parse(answer.content).code) == (503, "request.not_ready")
    assert "housekeeping has not run" in ProblemDetails.parse(answer.content).detail
    assert (
        swarm.public.get("/healthz").status_code == 200
    )  # it answers; whether it is of use is the other question


def test_metrics(swarm: SmallSwarm) -> None:
    swarm.start()
    before = swarm.public.get("/metrics").text
    for _ in range(3):
        swarm.work(swarm.node())
    text = swarm.public.get("/metrics").text
    values = dict(re.findall(r"^(shoal_\S+) (\S+)$", text, re.MULTILINE))
    assert values['shoal_nodes{trust="probation"}'] == "3.0"
    assert values['shoal_leases_ended_total{code="accepted"}'] == "3.0"
    assert (values["shoal_policy_version"], values["shoal_ready_groups"]) == ("0.0", "6.0")
    # The number of lines does not depend on the number of nodes.
    assert text.count("\n") == before.count("\n")
