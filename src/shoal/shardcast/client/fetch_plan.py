"""Plans how to get a file of a version: which bytes to start from, and which deltas to apply. Pure; the least to download wins.

    v8 raw  <- v9 delta  <- v10 delta  <- v11 delta = wanted          v9 is here:  2 deltas
    v8 also as a delta against v7                                     v5 is here:  v8 whole + 3 deltas, or 6 deltas
                                                                      none here:   v8 whole + 3 deltas

A manifest names one base, so all plans are stops on one walk back through the bases: at each version the file may be on this
machine, may be sent whole, may be a delta against the base's file, or may equal it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.wire.manifest import DELTA_SUFFIX, FileEntry, Manifest

PayloadName = tuple[int, str]
"""A version, and the name of a file that it sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """How to get one file."""

    name: str
    start: Path | int
    """A file on this machine, or the version that sends it whole."""
    deltas: tuple[int, ...]
    """Versions whose deltas are applied to it, in this order."""
    num_bytes: int
    """Bytes to download in total."""

    @property
    def payloads(self) -> tuple[PayloadName, ...]:
        """The files that must be downloaded."""
        whole = () if isinstance(self.start, Path) else ((self.start, self.name),)
        return whole + tuple((version, self.name + DELTA_SUFFIX) for version in self.deltas)

    def __str__(self) -> str:
        start = f"local {self.start.parent.name}" if isinstance(self.start, Path) else f"v{self.start} whole"
        return f"{self.name}: {start}" + "".join(f", delta of v{version}" for version in self.deltas)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFiles:
    """The files of the complete versions on this machine, by name and digest."""

    files: Mapping[tuple[str, str], tuple[Path, ...]]
    oldest_version: int | None


def cheapest_plan(
    name: str,
    manifest: Manifest,
    local: LocalFiles,
    *,
    look_up: Callable[[int, bool], Manifest | None],
    failed: Collection[FilePlan] = (),
    unavailable: Collection[PayloadName] = (),
) -> FilePlan | None:
    """Returns the plan with the least to download; None if there is none.

    Skips plans in `failed` and plans that need something in `unavailable`. `look_up(version, required)` returns the
    manifest of another version, or None if it cannot be had; `required` is False if some plan is known already.
    """
    best: FilePlan | None = None
    deltas: tuple[int, ...] = ()
    num_bytes = 0
    current = manifest
    while (entry := current.find(name)) is not None:
        here = local.files.get((name, entry.blake3), ())
        starts: list[tuple[Path | int, int]] = [(path, 0) for path in here]
        if entry.codec == "raw":
            starts.append((current.version, entry.num_bytes))
        for start, more in starts:
            plan = FilePlan(name=name, start=start, deltas=deltas, num_bytes=num_bytes + more)
            usable = plan not in failed and not set(plan.payloads) & set(unavailable)
            if usable and (best is None or plan.num_bytes < best.num_bytes):
                best = plan
        if entry.delta is not None:
            deltas = (current.version, *deltas)
            num_bytes += entry.delta.num_bytes
        if not _may_improve(entry, current, local, best, num_bytes):
            break
        assert current.base is not None, (
            "an entry that builds on another version is in a manifest that names it"
        )
        before = look_up(current.base, best is None)
        if before is None:
            break
        current = before
    return best


def _may_improve(
    entry: FileEntry, current: Manifest, local: LocalFiles, best: FilePlan | None, num_bytes: int
) -> bool:
    """Returns whether an older version may give a better plan."""
    if entry.codec == "raw" and entry.delta is None:
        return False
    if best is None:
        return True
    # Once a plan is known, an older snapshot cannot be cheaper, but an older version on this machine can.
    has_older = local.oldest_version is not None and local.oldest_version < current.version
    return num_bytes < best.num_bytes and has_older
