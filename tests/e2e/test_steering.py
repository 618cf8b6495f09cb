"""Steered draws in a bfloat16 run that calibrated itself: refused at once if they are far off, convicted by all of a node's work if not.

The liars have the leased weights, and prove their states. Where several tokens are near the random number of a draw, they take the one
that they prefer.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from liar_client import Liar
from swarm_processes import Swarm, calibrated_swarm

from shoal.rollout.adversary.adaptive import Adapted, EdgeEngine
from shoal.wire.codes import ACCEPTED, UNCERTAIN
from shoal.wire.messages import LeaseStatus

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

Enter = Callable[..., Liar]
FAR, NEAR = 0.3, 0.0015
"""Distances from the random number. FAR is refused in the smallest lease, of 16 rows. NEAR is within what honest work of another machine may be off in a single submission."""
LIFE = 60
"""Submissions within which NEAR is convicted. Scores of 4 and more convict after 18; `void.uncertain` counts less than those."""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    torch.set_num_threads(1)
    # A model that learns becomes sure of its tokens, and then few draws are near a random number: how many submissions convict would
    # depend on how fast this machine trains.
    settings = {"learning_rate": 1e-6}
    with calibrated_swarm(tmp_path_factory.mktemp("steering"), settings=settings) as swarm:
        swarm.wait_for_version(1)
        yield swarm


@pytest.fixture
def enter(swarm: Swarm, tmp_path: Path) -> Iterator[Enter]:
    """Returns a function that enrols a new node, which steers its draws if a distance is given."""
    liars: list[Liar] = []

    def enter(distance: float | None = None) -> Liar:
        behaviour = None if distance is None else Adapted(partial(EdgeEngine, distance=distance))
        liars.append(Liar(swarm.url, tmp_path / f"node-{len(liars)}", behaviour=behaviour))
        return liars[-1]

    yield enter
    for liar in liars:
        liar.close()


def deliver_until_refused(node: Liar) -> list[LeaseStatus]:
    """Returns the verdicts on a node's submissions up to the first refusal."""
    found: list[LeaseStatus] = []
    while len(found) < LIFE:
        found.append(node.deliver(node.made))
        if str(found[-1].code).startswith("reject."):
            return found
    raise AssertionError(f"{LIFE} submissions were not refused: {[status.code for status in found]}")


def test_draws_steered_far_are_refused_at_once(enter: Enter) -> None:
    assert [status.code for status in deliver_until_refused(enter(FAR))] == ["reject.wrong_sampling"]


def test_draws_steered_within_the_tolerance_are_convicted_by_their_sum(swarm: Swarm, enter: Enter) -> None:
    liar, honest = enter(NEAR), enter()
    assert honest.deliver(honest.made).code == ACCEPTED
    found = deliver_until_refused(liar)
    assert found[-1].code == "reject.accumulated_evidence"
    assert {status.code for status in found[:-1]} <= {ACCEPTED, UNCERTAIN}
    assert swarm.verdicts(liar.node)[-1]["evidence"]["verdict"] in (ACCEPTED, UNCERTAIN)
    # The work of new nodes is doubted now: one in forty honest submissions is as far off as DOUBTFUL, and void.
    assert honest.deliver(honest.made).code in (ACCEPTED, UNCERTAIN)
    swarm.wait_for_versions(3)
    swarm.assert_only_accepted_work_is_trained_on()
