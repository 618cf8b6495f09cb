"""Fetch plans: the least to download, around what is unavailable, and no further back than may help."""

from pathlib import Path
from typing import Literal

import pytest

from shoal.shardcast.client.fetch_plan import FilePlan, LocalFiles, cheapest_plan
from shoal.wire.manifest import Delta, FileEntry, Manifest

NUM_BYTES, DELTA_BYTES = 1000, 30


def digest(version: int) -> str:
    return f"{version:064x}"


def manifest(version: int, codec: Literal["raw", "delta", "same"], *, with_delta: bool = False) -> Manifest:
    delta = {"delta": Delta(num_bytes=DELTA_BYTES, blake3=digest(0), shards=(digest(0),))}
    entry = FileEntry(
        name="w.json",
        num_bytes=NUM_BYTES,
        blake3=digest(version),
        codec=codec,
        shard_bytes=NUM_BYTES,
        shards=(digest(0),) if codec == "raw" else (),
        **(delta if codec == "delta" or with_delta else {}),
    )
    builds = codec != "raw" or with_delta
    return Manifest(
        run="r", version=version, base=version - 1 if builds else None, files=(entry,), created_at_s=0.0
    )


LINE = {0: manifest(0, "raw"), 4: manifest(4, "raw", with_delta=True)}
LINE |= {version: manifest(version, "delta") for version in (1, 2, 3, 5, 6, 7)}


def local(*versions: int) -> LocalFiles:
    return LocalFiles(
        files={("w.json", digest(version)): (Path(f"/x/v{version}/w.json"),) for version in versions},
        oldest_version=min(versions, default=None),
    )


class Planned:
    def __init__(self, wanted: int, here: LocalFiles, missing: tuple[int, ...] = (), **terms: object) -> None:
        self.looked_up: list[int] = []

        def look_up(version: int, required: bool) -> Manifest | None:
            self.looked_up.append(version)
            return None if version in missing else LINE[version]

        self.plan = cheapest_plan("w.json", LINE[wanted], here, look_up=look_up, **terms)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "here", "start", "deltas", "num_bytes"),
    [
        (0, (), 0, (), 1000),
        (2, (), 0, (1, 2), 1060),
        (4, (), 4, (), 1000),
        (4, (3,), "v3", (4,), 30),
        (7, (), 4, (5, 6, 7), 1090),
        (7, (6,), "v6", (7,), 30),
        (7, (5, 6), "v6", (7,), 30),
        (7, (1,), "v1", (2, 3, 4, 5, 6, 7), 180),
        (7, (7,), "v7", (), 0),
        (3, (9,), 0, (1, 2, 3), 1090),
    ],
)
def test_the_least_to_download(
    wanted: int, here: tuple[int, ...], start: int | str, deltas: tuple[int, ...], num_bytes: int
) -> None:
    plan = Planned(wanted, local(*here)).plan
    assert plan is not None
    assert (plan.start.parent.name if isinstance(plan.start, Path) else plan.start) == start
    assert (plan.deltas, plan.num_bytes) == (deltas, num_bytes)


def test_no_manifest_is_asked_for_that_cannot_help() -> None:
    assert Planned(7, local(6)).looked_up == [6]
    assert Planned(4, local()).looked_up == []
    assert Planned(4, local(9)).looked_up == []
    assert Planned(7, local()).looked_up == [6, 5, 4]
    assert Planned(7, local(1)).looked_up == [6, 5, 4, 3, 2, 1]


def test_a_missing_manifest_ends_the_walk() -> None:
    assert Planned(3, local(), missing=(1,)).plan is None
    plan = Planned(7, local(1), missing=(2,)).plan
    assert plan is not None and plan.start == 4


def test_plans_around_what_failed() -> None:
    first = Planned(7, local(1)).plan
    assert first is not None
    assert first.payloads == tuple((version, "w.json.delta") for version in (2, 3, 4, 5, 6, 7))
    around = Planned(7, local(1), unavailable={(3, "w.json.delta")}).plan
    assert around is not None and around.payloads == (
        (4, "w.json"),
        (5, "w.json.delta"),
        (6, "w.json.delta"),
        (7, "w.json.delta"),
    )
    other = Planned(7, local(1), failed={first}).plan
    assert other == around
    assert Planned(7, local(1), unavailable={(7, "w.json.delta")}).plan is None


def test_an_unchanged_file_comes_from_the_older_version() -> None:
    same = manifest(1, "same")
    plan = cheapest_plan("w.json", same, local(), look_up=lambda version, required: LINE[version])
    assert plan == FilePlan(name="w.json", start=0, deltas=(), num_bytes=1000)
    assert cheapest_plan("x", same, local(), look_up=lambda version, required: LINE[version]) is None
