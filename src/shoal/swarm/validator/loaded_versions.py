"""The policy versions that a validator has in memory. Fetches and loads others, in place of the least recently used one.

get         for a claim        returns a version; fetches and loads it if necessary
watch       beside the checks  fetches the newest version to the disk, as a delta where there is one, before a claim names it
load_ahead  without a claim    loads what `watch` has fetched
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal.files import is_out_of_memory
from shoal.model.load_model import free_bytes
from shoal.model.tokenizer import Tokenizer, load_tokenizer
from shoal.model.weights import WEIGHTS_FILE, load_weights
from shoal.net.http_client import Refused, SignedClient, Tickets, Unreachable
from shoal.net.waiting import DeadlinePassed, LinkedEvent, Stopped
from shoal.shardcast import RelayChoice, fetch_version, prune_versions
from shoal.shardcast.manifest_files import find_manifest, version_folder
from shoal.swarm.validator.prefill import CannotCheck, LoadedPolicy, Model
from shoal.telemetry import Log
from shoal.wire.codes import CorruptData, Rejected
from shoal.wire.lease import Lease
from shoal.wire.manifest import Manifest
from shoal.wire.messages import Info
from shoal.wire.record import Sealed

KEEP_ON_DISK = 4
"""Fetched versions that stay on disk."""
MOST_LOADED = 3
"""Versions in memory, if they fit: max_lag + 1 with the default lag."""
ROOM = 1.5
"""Another version is loaded beside the others if this many times its bytes are free; checks need memory too."""
LEAST_BATCH_TOKENS = 512
LEAST_FETCH_S = 120.0
WATCH_S = 0.25
"""Seconds between two questions for the newest version."""
POLL_S = 0.1
SLOWEST_BYTES_PER_S = 5e6
"""Rate that a fetch is given time for: a 32B model of 65 GB gets 3.6 hours."""
_UNAVAILABLE = (CorruptData, Rejected, Refused, Unreachable, DeadlinePassed, ValueError, OSError)
"""What fetching and reading a version raises if it cannot be had."""


@dataclass(frozen=True, slots=True)
class _FetchAhead:
    """A fetch of `watch`. Setting `stop` ends it; what was fetched so far stays on the disk."""

    version: int
    stop: LinkedEvent


class LoadedVersions:
    """A cache of policy versions by version number. Missing weights raise CannotCheck, so that no node is blamed.

    One version is fetched at a time: `_fetch_lock` is held meanwhile. A fetch for a claim stops a fetch ahead of another version.
    """

    def __init__(
        self,
        folder: Path,
        client: SignedClient,
        *,
        run_key: str,
        load: Callable[[Path], Model],
        max_loaded: int | None,
        fetch_s: float | None,
        log: Log,
    ) -> None:
        """`max_loaded=None`: as many versions as fit, at most MOST_LOADED. `fetch_s=None`: time in proportion to the size."""
        self._folder, self._client, self._run_key, self._log = folder, client, run_key, log
        self._load_decoder, self._max_loaded, self._fetch_s = load, max_loaded, fetch_s
        self._relays = RelayChoice(ticket=Tickets(client, log=log))
        self._loaded: OrderedDict[int, LoadedPolicy] = OrderedDict()
        self._digests: dict[int, str] = {}
        """Digests of the weights that were loaded, by version."""
        self._fetched: Sealed[Manifest] | None = None
        """The newest version that `watch` has fetched and nothing has loaded."""
        self._same_model: tuple[object, Tokenizer] | None = None
        self._fetch_lock = threading.Lock()
        self._fetch_ahead: _FetchAhead | None = None
        self._sources: tuple[tuple[str, ...], str] = ((), "")
        """Relays and origin of the newest claim."""
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, version: int, lease: Lease, relays: tuple[str, ...] = (), origin: str = "") -> LoadedPolicy:
        """Returns a version. One that is not loaded is fetched from `relays`, or from the lease's relays if there are none.

        The origin is asked when relays deliver too little.
        """
        leased = {policy.version: policy.weights_digest for policy in lease.policies}
        if version in self._loaded and self._digests[version] == leased.get(version):
            self._loaded.move_to_end(version)
            return self._loaded[version]
        try:
            manifest = self._manifest(version, lease)
            self._sources = (relays or lease.relays, origin or lease.origin)
            with self._hold_lock_for_claim(version):
                folder = self._fetch(manifest, self._relays, self._client.stop)
                policy = self._load_and_prune(folder, manifest.body)
        except (*_UNAVAILABLE, RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                raise
            raise CannotCheck(f"policy version {version} is not available: {error}") from None
        return policy

    def load_ahead(self) -> None:
        """Loads the version that `watch` fetched last, beside others or in place of the least used of several.

        Call it in the thread that calls `get`, while there is no claim.
        """
        sealed = self._fetched
        if sealed is None or (len(self._loaded) < 2 and not self._has_room()):
            return  # the only version in memory is needed for the next claim
        if not self._fetch_lock.acquire(blocking=False):
            return  # `watch` is fetching another
        try:
            self._fetched = None
            manifest = sealed.open(self._run_key)
            folder = version_folder(self._folder, manifest.version)
            found = find_manifest(folder)
            # A claim may have fetched other weights of this number since: the trainer crashed and published it again.
            if manifest.version not in self._loaded and found is not None and found.yields_the_same(manifest):
                self._load_and_prune(folder, manifest)
        except (*_UNAVAILABLE, RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                raise
            self._log.warning("a new version cannot be loaded ahead of time", reason=error)
        finally:
            self._fetch_lock.release()

    def watch(self, client: SignedClient) -> None:
        """Fetches each new version before a claim names it, until the client is stopped. Runs in a thread, with its own client."""
        relays = RelayChoice(ticket=Tickets(client, log=self._log))
        done, last_error = -1, ""
        while not client.stop.wait(WATCH_S):
            try:
                newest = client.call("GET", "/v1/info", None, Info).newest_version
                if newest is None or newest <= done or not any(self._sources):
                    continue
                sealed = client.call("GET", f"/v1/policies/{newest}", None, Sealed[Manifest])
                if self._fetch_before_claims(sealed, relays, client.stop):
                    done = newest
            except _UNAVAILABLE as error:
                if str(error) != last_error:
                    last_error = str(error)
                    self._log.warning("a new version cannot be fetched ahead of time", reason=error)
            except Stopped:
                pass  # the validator stops, or a claim needs another version

    def _fetch_before_claims(
        self, sealed: Sealed[Manifest], relays: RelayChoice, stop: threading.Event
    ) -> bool:
        """Fetches a version unless a claim's fetch is in progress; returns whether it is here now."""
        if not self._fetch_lock.acquire(blocking=False):
            return False
        try:
            version = sealed.open(self._run_key).version
            self._fetch_ahead = ahead = _FetchAhead(version, LinkedEvent(stop))
            self._fetch(sealed, relays, ahead.stop)
            # The thread that loads versions keeps one less, so it is the one that recycles: it knows that it reads none of them.
            prune_versions(self._folder, KEEP_ON_DISK + 1)
            self._fetched = sealed
            self._log.info("fetched ahead", version=version)
        finally:
            self._fetch_ahead = None
            self._fetch_lock.release()
        return True

    @contextmanager
    def _hold_lock_for_claim(self, version: int) -> Iterator[None]:
        """Holds the fetch lock, and stops a fetch ahead of any other version."""
        while not self._fetch_lock.acquire(timeout=POLL_S):
            if (ahead := self._fetch_ahead) is not None and ahead.version != version:
                ahead.stop.set()
            if self._client.stop.is_set():
                raise Stopped(f"stopped before version {version} was fetched")
        try:
            yield
        finally:
            self._fetch_lock.release()

    def _fetch(self, manifest: Sealed[Manifest], relays: RelayChoice, stop: threading.Event) -> Path:
        """Fetches a version to the disk. The caller holds the fetch lock."""
        sources, origin = self._sources
        relays.update(sources, last=origin)
        return fetch_version(
            manifest,
            relays,
            self._folder,
            run_key=self._run_key,
            log=self._log,
            stop=stop,
            deadline_s=self._fetch_s or fetch_seconds(manifest.body.num_bytes),
            while_growing=True,
        )

    def _manifest(self, version: int, lease: Lease) -> Sealed[Manifest]:
        sealed = self._client.call_until(
            f"the manifest of version {version}",
            "GET",
            f"/v1/policies/{version}",
            None,
            Sealed[Manifest],
            deadline_s=self._fetch_s or LEAST_FETCH_S,
        )
        manifest = sealed.open(self._run_key)
        leased = {policy.version: policy.weights_digest for policy in lease.policies}
        found = (manifest.run, manifest.version, manifest.weights_digest)
        if found != (lease.run, version, leased.get(version)):
            raise ValueError(f"the manifest {found} does not have the weights that the lease names")
        return sealed

    def _load_and_prune(self, folder: Path, manifest: Manifest) -> LoadedPolicy:
        """Loads a version and deletes old ones from the disk. The caller holds the fetch lock."""
        self._loaded.pop(manifest.version, None)
        policy = self._loaded[manifest.version] = self._load(folder, manifest)
        self._digests[manifest.version] = manifest.weights_digest
        self._log.info("loaded policy", version=manifest.version, bytes=manifest.num_bytes)
        prune_versions(self._folder, KEEP_ON_DISK, recycle=True)
        return policy

    def _load(self, folder: Path, manifest: Manifest) -> LoadedPolicy:
        # While config and tokenizer stay the same, a decoder's memory is reused for another version's weights.
        others = frozenset(
            (entry.name, entry.blake3) for entry in manifest.files if entry.name != WEIGHTS_FILE
        )
        if self._same_model is None or self._same_model[0] != others:
            self._loaded.clear()
            self._same_model = (others, load_tokenizer(folder))
        tokenizer = self._same_model[1]
        if self._has_room():
            try:
                return LoadedPolicy(manifest.version, self._load_decoder(folder), tokenizer, folder=folder)
            except (RuntimeError, MemoryError) as error:
                if not self._loaded or not is_out_of_memory(error):
                    raise
        _, least_used = self._loaded.popitem(last=False)
        load_weights(least_used.decoder, folder / WEIGHTS_FILE)
        return LoadedPolicy(manifest.version, least_used.decoder, tokenizer, folder=folder)

    def _has_room(self) -> bool:
        """Returns whether another version may be loaded beside those in memory."""
        if self._max_loaded is not None or not self._loaded:
            return len(self._loaded) < (self._max_loaded or 1)
        parameters = list(next(iter(self._loaded.values())).decoder.parameters())
        needed = ROOM * sum(parameter.nbytes for parameter in parameters)
        return len(self._loaded) < MOST_LOADED and free_bytes(parameters[0].device) > needed


def tokens_that_fit(model: Model, most: int) -> int:
    """Returns how many tokens, up to `most`, a prefill may have if its activations shall fit into half of the free memory.

    Counts the widest values of a layer: those between the two products of an MLP. A 7B model measured 83 kB a token.
    """
    weight = model.head().weight_VH
    widest = max(max(parameter.shape) for parameter in model.blocks()[0].parameters())
    per_token = weight.element_size() * (2 * widest + 4 * model.shape.hidden_size)
    return max(LEAST_BATCH_TOKENS, min(most, free_bytes(weight.device) // 2 // per_token))


def fetch_seconds(num_bytes: int) -> float:
    """Returns how long a version of this size may take to fetch."""
    return max(LEAST_FETCH_S, num_bytes / SLOWEST_BYTES_PER_S)
