"""Kills every role and `shoal run` itself in the middle of a run: the run continues, and its records are consistent."""

import time
from functools import partial
from pathlib import Path

import pytest
from books import check_books, keep_head
from swarm_processes import Swarm, is_alive

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LEAVE_S = 10.0


def being_checked(swarm: Swarm) -> bool:
    path = swarm.folder / "validator-1" / "checking.json"
    return path.exists() and path.read_text() not in ("", "{}")


def at_work(swarm: Swarm) -> bool:
    """Returns whether a node holds a lease that it has not submitted yet."""
    stats = swarm.stats()
    return stats is not None and stats.open_leases > 0


def uploading(swarm: Swarm) -> bool:
    return any((swarm.folder / "coordinator" / "objects" / "incoming").iterdir())


def newest_served(swarm: Swarm) -> int:
    return max(
        (int(path.name[1:]) for path in (swarm.folder / "trainer" / "versions").glob("v*")), default=-1
    )


def assert_nothing_is_left(swarm: Swarm) -> None:
    assert not swarm.processes(), "processes are left behind"
    assert not (swarm.folder / "pids.json").exists()


def test_each_role_killed_in_the_middle_of_its_work(tmp_path: Path) -> None:
    # Large batches make versions slow, so that each moment occurs before the last version.
    with Swarm(tmp_path, last_version=14, settings={"groups_per_step": 24}) as swarm:
        heads, version = [], 0
        moments = {
            "worker-1": ("a lease being worked on", lambda: at_work(swarm)),
            "validator-1": ("a submission being checked", lambda: being_checked(swarm)),
            "relay-1": ("nothing in particular", lambda: True),
            # The version is served, perhaps not announced: the trainer must announce exactly this one after its restart.
            "trainer": ("a version not yet announced", lambda: newest_served(swarm) > version),
            # An upload is in the folder for less than a millisecond, so that none may be seen.
            "coordinator": (
                "an upload half arrived, or two versions",
                lambda: uploading(swarm) or newest_served(swarm) > version + 1,
            ),
        }
        for number, (role, (what, look)) in enumerate(moments.items()):
            version = swarm.wait_for_version(1 + 2 * number).newest_version or 0
            heads.append(keep_head(swarm))
            before = swarm.pids()[role]
            swarm.kill_when(role, what, look)
            swarm.wait_until_back(role, before)
        assert swarm.wait_until_over() == 0, swarm.output
        for role in moments:
            assert f"{role} ended with signal SIGKILL; restarted (1 of 5)" in swarm.output
        assert_nothing_is_left(swarm)
        check_books(swarm, heads)


def test_all_roles_killed_together_and_again(tmp_path: Path) -> None:
    with Swarm(tmp_path, last_version=10) as swarm:
        heads = []
        for version in (1, 5):
            swarm.wait_for_version(version)
            heads.append(keep_head(swarm))
            before = swarm.pids()
            for role in before:
                swarm.kill(role)
            for role, pid in before.items():
                swarm.wait_until_back(role, pid)
        assert swarm.wait_until_over() == 0, swarm.output
        assert_nothing_is_left(swarm)
        check_books(swarm, heads)


def test_the_trainer_and_the_coordinator_over_and_over(tmp_path: Path) -> None:
    with Swarm(tmp_path, last_version=12, relays=1, workers=1) as swarm:
        for number in range(3):
            for role in ("coordinator", "trainer"):
                version = swarm.wait_for_version(1 + 2 * number).newest_version or 0
                before = swarm.pids()[role]
                if role == "trainer":
                    swarm.kill_when(role, "the next batch", partial(has_batch, swarm, version))
                else:
                    swarm.kill(role)
                swarm.wait_until_back(role, before)
        assert swarm.wait_until_over() == 0, swarm.output
        check_books(swarm)


def has_batch(swarm: Swarm, version: int) -> bool:
    """Returns whether the trainer has fetched the batch of this version or is further."""
    stats = swarm.stats()
    return stats is not None and (stats.batches > version or stats.newest_version != version)


def test_shoal_run_itself(tmp_path: Path) -> None:
    with Swarm(tmp_path, last_version=8) as swarm:
        swarm.wait_for_version(1)
        heads = [keep_head(swarm)]
        everything = swarm.processes()
        assert set(swarm.pids().values()) < everything
        assert len(swarm.pids()) == 7
        killed_s = time.monotonic()
        swarm.crash()
        while left := {pid for pid in everything if is_alive(pid)}:
            assert time.monotonic() - killed_s < LEAVE_S, f"still there: {left}"
            time.sleep(0.05)
        assert not swarm.processes()

        swarm.start("--resume")
        swarm.wait_for_version(4)
        heads.append(keep_head(swarm))
        swarm.crash()

        # Starts at once: the new run waits for the processes of the killed one to end.
        swarm.start("--resume")
        assert swarm.wait_until_over() == 0, swarm.output
        assert "waiting for another `shoal` in" in swarm.output
        assert_nothing_is_left(swarm)
        check_books(swarm, heads)
