"""Ways to a file: the least to fetch, around what cannot be had, and no further back than may help."""

from pathlib import Path

import pytest

from shoal.shardcast.client.fetch_plan import Shelf, Way, shortest_way
from shoal.wire.manifest import Delta, FileEntry, Manifest

NUM_BYTES, DELTA_BYTES = 1000, 30


def digest(version: int) -> str:
    return f"{version:064x}"


def manifest(version: int, codec: str, *, with_delta: bool = False) -> Manifest:
    delta = {"delta": Delta(num_bytes=DELTA_BYTES, blake3=digest(0), shards=(digest(0),))}
    entry = FileEntry(
        name="w",
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


def shelf(*versions: int) -> Shelf:
    return Shelf(
        files={("w", digest(version)): (Path(f"/x/v{version}/w"),) for version in versions},
        oldest=min(versions, default=None),
    )


class Plan:
    def __init__(self, wanted: int, here: Shelf, missing: tuple[int, ...] = (), **terms: object) -> None:
        self.looked_up: list[int] = []

        def look_up(version: int, urgent: bool) -> Manifest | None:
            self.looked_up.append(version)
            return None if version in missing else LINE[version]

        self.way = shortest_way("w", LINE[wanted], here, look_up=look_up, **terms)  # type: ignore[arg-type]


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
def test_the_least_to_fetch(
    wanted: int, here: tuple[int, ...], start: int | str, deltas: tuple[int, ...], num_bytes: int
) -> None:
    way = Plan(wanted, shelf(*here)).way
    assert way is not None
    assert (way.start.parent.name if isinstance(way.start, Path) else way.start) == start
    assert (way.deltas, way.num_bytes) == (deltas, num_bytes)


def test_no_manifest_is_asked_for_that_cannot_help() -> None:
    assert Plan(7, shelf(6)).looked_up == [6]
    assert Plan(4, shelf()).looked_up == []
    assert Plan(4, shelf(9)).looked_up == []
    assert Plan(7, shelf()).looked_up == [6, 5, 4]
    assert Plan(7, shelf(1)).looked_up == [6, 5, 4, 3, 2, 1]


def test_a_missing_manifest_ends_the_walk() -> None:
    assert Plan(3, shelf(), missing=(1,)).way is None
    way = Plan(7, shelf(1), missing=(2,)).way
    assert way is not None and way.start == 4


def test_ways_around_what_failed() -> None:
    first = Plan(7, shelf(1)).way
    assert first is not None
    assert first.payloads == tuple((version, "w.delta") for version in (2, 3, 4, 5, 6, 7))
    around = Plan(7, shelf(1), unreachable={(3, "w.delta")}).way
    assert around is not None and around.payloads == (
        (4, "w"),
        (5, "w.delta"),
        (6, "w.delta"),
        (7, "w.delta"),
    )
    refused = Plan(7, shelf(1), refused={first}).way
    assert refused == around
    assert Plan(7, shelf(1), unreachable={(7, "w.delta")}).way is None


def test_a_file_that_is_the_same_is_the_older_ones() -> None:
    same = manifest(1, "same")
    way = shortest_way("w", same, shelf(), look_up=lambda version, urgent: LINE[version])
    assert way == Way(name="w", start=0, deltas=(), num_bytes=1000)
    assert shortest_way("x", same, shelf(), look_up=lambda version, urgent: LINE[version]) is None
