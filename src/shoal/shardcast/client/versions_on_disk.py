"""Fetch a version from relays that need not be trusted: the signature says what is right, the digests check it.

into/v7.partial/   on its way; taken up again after a restart
into/v7/           complete: every shard and every file was checked before it got this name
into/.boot         boot.py
"""

import random
import shutil
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from shoal.net.waiting import NotYet, wait_for
from shoal.shardcast.assembly import has_digest
from shoal.shardcast.boot import mark_boot, same_boot
from shoal.shardcast.client.fetch import Fetch
from shoal.shardcast.client.http_source import Broken, Connections, NotThere, ask_latest, ask_manifest
from shoal.shardcast.client.relay_choice import RelayChoice
from shoal.shardcast.disk import NoRoom
from shoal.shardcast.folders import partial_folders, version_folder, version_folders
from shoal.shardcast.manifest_files import doubt_files, open_manifest, read_manifest
from shoal.telemetry import Log
from shoal.wire.codes import Rejected
from shoal.wire.manifest import Manifest
from shoal.wire.record import Sealed

POLL_S, PAUSE_S = 5.0, 0.2
"""How long a relay may think about a new version; and between two questions, for one that answers at once."""
LEAST_S = 0.1
"""With less time left a fetch is not begun again: it would end for want of time, and not say that there was no room."""


def fetch_version(
    manifest: Sealed[Manifest],
    relays: Sequence[str] | RelayChoice,
    into: Path,
    *,
    run_key: str,
    log: Log,
    stop: threading.Event,
    deadline_s: float,
) -> Path:
    """The folder of the version, complete and verified: `into/v{version}`.

    With an earlier version in `into`, only what changed since is fetched, where the publisher sends that.

    Give a RelayChoice instead of URLs to remember over several fetches which relays are good, and to show them a ticket.
    Raises Rejected for a manifest the run key did not sign, CorruptData if every way to a file gave wrong bytes, DeadlinePassed
    with every relay's last failure or with the folder that is full, Stopped, and OSError when the disk fails.
    """
    body = open_manifest(manifest, run=None, run_key=run_key)
    final = version_folder(into, body.version)
    if not same_boot(into):
        _check_all(into, log)
    if _is_whole(final, body):
        return final
    choice = relays if isinstance(relays, RelayChoice) else RelayChoice(relays)

    def ask(version: int, within_s: float) -> Sealed[Manifest]:
        return fetch_manifest(
            version, choice, run_key=run_key, log=log, stop=stop, deadline_s=within_s, run=body.run
        )

    give_up_s, no_room = time.monotonic() + deadline_s, ""

    def attempt() -> Path:
        nonlocal no_room
        left_s = give_up_s - time.monotonic()
        if no_room and left_s < LEAST_S:
            raise NotYet(no_room)
        try:
            fetch = Fetch(manifest, into, run_key=run_key, log=log, stop=stop)
            fetch.run(choice, ask, left_s)
        except NoRoom as reason:
            no_room = str(reason)
            raise NotYet(no_room) from None
        return fetch.partial

    partial = wait_for(f"room for version {body.version}", attempt, deadline_s=deadline_s, log=log, stop=stop)
    if final.exists():  # of the same number, but not these files
        shutil.rmtree(final)
    partial.rename(final)
    return final


def fetch_manifest(
    version: int | None,
    relays: Sequence[str] | RelayChoice,
    *,
    run_key: str,
    log: Log,
    stop: threading.Event,
    deadline_s: float,
    run: str | None = None,
) -> Sealed[Manifest]:
    """The signed manifest of a version, or of the newest that any of the relays knows (None)."""
    choice = relays if isinstance(relays, RelayChoice) else RelayChoice(relays)
    what = f"the manifest of version {version}" if version is not None else "the newest manifest"

    def attempt() -> Sealed[Manifest]:
        found: list[Sealed[Manifest]] = []
        reasons = []
        for url in random.sample(choice.urls, len(choice.urls)):
            try:
                sealed = _ask(connections, url, version)
                open_manifest(sealed, run=run, run_key=run_key)
            except (NotThere, Broken, Rejected) as reason:
                reasons.append(f"{url}: {reason}")
                continue
            if version is not None:
                return sealed
            found.append(sealed)
        if not found:
            raise NotYet("; ".join(reasons) or "no relay known")
        return max(found, key=lambda sealed: sealed.body.version)

    with Connections(choice.ticket) as connections:
        return wait_for(what, attempt, deadline_s=deadline_s, log=log, stop=stop)


def fetch_newer(
    after: int,
    relays: Sequence[str] | RelayChoice,
    *,
    run_key: str,
    log: Log,
    stop: threading.Event,
    deadline_s: float,
    run: str | None = None,
) -> Sealed[Manifest]:
    """The signed manifest of a version later than `after`, as soon as a relay knows one: relays answer when they do (long poll)."""
    choice = relays if isinstance(relays, RelayChoice) else RelayChoice(relays)

    def attempt() -> Sealed[Manifest]:
        reasons = []
        urls = random.sample(choice.urls, len(choice.urls))
        for url in urls:
            try:
                # All are asked, and one of them, each time another, is waited for.
                wait_s = min(POLL_S, deadline_s) if url == urls[-1] else 0.0
                sealed = ask_latest(connections, url, after=after, wait_s=wait_s)
                if sealed is not None and open_manifest(sealed, run=run, run_key=run_key).version > after:
                    return sealed
                reasons.append(f"{url}: nothing newer")
            except (NotThere, Broken, Rejected) as reason:
                reasons.append(f"{url}: {reason}")
        raise NotYet("; ".join(reasons) or "no relay known", PAUSE_S)

    with Connections(choice.ticket) as connections:
        return wait_for(
            f"a version after {after}", attempt, deadline_s=deadline_s, log=log, stop=stop, say_every_s=60.0
        )


def prune_versions(into: Path, keep_versions: int, *, spare: Collection[int] = ()) -> list[int]:
    """Delete all but the newest versions in a client's folder and those to `spare`, and older downloads that were given up."""
    if keep_versions < 1:
        raise ValueError(f"keep_versions={keep_versions} must be at least 1")
    whole, partial = version_folders(into), partial_folders(into)
    oldest_kept = min(list(whole)[-keep_versions:], default=0)
    gone = sorted(
        version for version in whole.keys() | partial.keys() if version < oldest_kept and version not in spare
    )
    for version in gone:
        for folders in (whole, partial):
            if version in folders:
                shutil.rmtree(folders[version])
    return gone


def _ask(connections: Connections, url: str, version: int | None) -> Sealed[Manifest]:
    if version is None:
        sealed = ask_latest(connections, url)
        if sealed is None:
            raise NotThere("no version is known there yet")
        return sealed
    return ask_manifest(connections, url, version)


def _check_all(into: Path, log: Log) -> None:
    """The machine has been started since: hash what lies here before its names are believed."""
    into.mkdir(parents=True, exist_ok=True)
    for path in partial_folders(into).values():
        doubt_files(path)  # shards are hashed as they are taken up
    for path in version_folders(into).values():
        if not _is_right(path):
            log.warning(f"{path} is not what its manifest says; it is fetched again")
            shutil.rmtree(path)
    mark_boot(into)


def _is_right(folder: Path) -> bool:
    try:
        sealed = read_manifest(folder)
    except Rejected:
        return False
    return sealed is not None and all(has_digest(folder / entry.name, entry) for entry in sealed.body.files)


def _is_whole(folder: Path, manifest: Manifest) -> bool:
    """Whether an earlier fetch of these very files ended here. It got its name only after every check."""
    try:
        standing = read_manifest(folder)
    except Rejected:
        return False
    return (
        standing is not None
        and standing.body.yields_the_same(manifest)
        and all(
            (folder / entry.name).is_file() and (folder / entry.name).stat().st_size == entry.num_bytes
            for entry in manifest.files
        )
    )
