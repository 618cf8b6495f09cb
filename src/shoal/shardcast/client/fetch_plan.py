"""The ways to a file of a version: which bytes to start from, which deltas to apply. Pure; the least to fetch wins.

    v8 raw  <- v9 delta  <- v10 delta  <- v11 delta = wanted          have v9:   2 deltas
    v8 also as a delta of v7                                          have v5:   v8 whole + 3 deltas, or 6 deltas
                                                                      have none: v8 whole + 3 deltas

A manifest names one base, so the ways are stops on one walk back: at each version the file may lie here already, may be
sent whole, or is made of the base's by a delta, or is the base's.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.wire.manifest import DELTA_SUFFIX, FileEntry, Manifest

Payload = tuple[int, str]
"""A version, and the name of something that it sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    name: str
    start: Path | int
    """A file that is here, or the version that sends it whole."""
    deltas: tuple[int, ...]
    """Versions whose deltas are applied to it, in this order."""
    num_bytes: int
    """To be fetched, in all."""

    @property
    def payloads(self) -> tuple[Payload, ...]:
        whole = () if isinstance(self.start, Path) else ((self.start, self.name),)
        return whole + tuple((version, self.name + DELTA_SUFFIX) for version in self.deltas)

    def __str__(self) -> str:
        start = f"{self.start.parent.name} here" if isinstance(self.start, Path) else f"v{self.start} whole"
        return f"{self.name}: {start}" + "".join(f", delta of v{version}" for version in self.deltas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """The whole versions that are here: where each of their files lies, by name and digest."""

    files: Mapping[tuple[str, str], tuple[Path, ...]]
    oldest: int | None

    def find(self, entry: FileEntry) -> tuple[Path, ...]:
        return self.files.get((entry.name, entry.blake3), ())


def shortest_way(
    name: str,
    manifest: Manifest,
    shelf: Shelf,
    *,
    look_up: Callable[[int, bool], Manifest | None],
    refused: Collection[Way] = (),
    unreachable: Collection[Payload] = (),
) -> Way | None:
    """The way with the least to fetch that is neither refused nor needs what cannot be had; None if there is none.

    `look_up(version, urgent)` gives another version's manifest, or None where it cannot be had; not urgent when a way is
    known already.
    """
    best: Way | None = None
    deltas: tuple[int, ...] = ()
    num_bytes = 0
    current = manifest
    while (entry := _find(current, name)) is not None:
        starts: list[tuple[Path | int, int]] = [(path, 0) for path in shelf.find(entry)]
        if entry.codec == "raw":
            starts.append((current.version, entry.num_bytes))
        for start, more in starts:
            way = Way(name=name, start=start, deltas=deltas, num_bytes=num_bytes + more)
            usable = way not in refused and not set(way.payloads) & set(unreachable)
            if usable and (best is None or way.num_bytes < best.num_bytes):
                best = way
        if entry.delta is not None:
            deltas = (current.version, *deltas)
            num_bytes += entry.delta.num_bytes
        if not _goes_on(entry, current, shelf, best, num_bytes):
            break
        assert current.base is not None, (
            "an entry that builds on another version is in a manifest that names it"
        )
        before = look_up(current.base, best is None)
        if before is None:
            break
        current = before
    return best


def _goes_on(entry: FileEntry, current: Manifest, shelf: Shelf, best: Way | None, num_bytes: int) -> bool:
    """Whether walking further back may bring a better way."""
    if entry.codec == "raw" and entry.delta is None:
        return False
    if best is None:
        return True
    # Beyond a way that is known, an older snapshot is no gain; an older version that is here may be one.
    return num_bytes < best.num_bytes and shelf.oldest is not None and shelf.oldest < current.version


def _find(manifest: Manifest, name: str) -> FileEntry | None:
    return next((entry for entry in manifest.files if entry.name == name), None)
