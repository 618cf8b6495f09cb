"""Versions are fetched once, swapped in place, and never believed without their digest."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from honest_work import make_lease, make_spec
from loopback import LOG, Swarm, origin_of
from torch import nn

from shoal.background import BackgroundTask
from shoal.model.load_model import load_decoder
from shoal.net.waiting import LinkedEvent
from shoal.shardcast import RelayChoice
from shoal.swarm.validator import loaded_versions
from shoal.swarm.validator.loaded_versions import LoadedVersions, fetch_seconds, tokens_that_fit
from shoal.swarm.validator.prefill import CannotCheck, Model
from shoal.wire.keys import Key
from shoal.wire.lease import Lease, PolicyRef


@pytest.fixture
def origin(swarm: Swarm) -> Iterator[str]:
    with origin_of(swarm) as url:
        for version in range(3):
            swarm.publish(version, url)
        yield url


def lease_on(swarm: Swarm, url: str, *, digest: str | None = None) -> Lease:
    refs = []
    for version in range(3):
        held = swarm.store.get(version)
        assert held is not None
        refs.append(PolicyRef(version=version, weights_digest=digest or held.sealed.body.weights_digest))
    return make_lease(make_spec()).model_copy(update={"policies": tuple(refs), "relays": (url,)})


def make_versions(
    swarm: Swarm,
    *,
    run_key: str | None = None,
    max_loaded: int | None = 2,
    load: Callable[[Path], Model] = load_decoder,
) -> LoadedVersions:
    return LoadedVersions(
        swarm.dir / "versions",
        swarm.client_of(swarm.key("validator")),
        run_key=run_key or swarm.key("run").public,
        load=load,
        max_loaded=max_loaded,
        fetch_s=5.0,
        log=LOG,
    )


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_least_recently_used_version_is_replaced(swarm: Swarm, origin: str) -> None:
    versions, lease = make_versions(swarm), lease_on(swarm, origin)
    zero, one = versions.get(0, lease), versions.get(1, lease)
    assert versions.get(0, lease) is zero, "a loaded version is not loaded again"
    two = versions.get(2, lease)
    assert two.decoder is one.decoder, "version 1 was used least"
    assert same_weights(two.decoder, load_decoder(swarm.store.path(2))), "a swap equals a fresh load"
    assert same_weights(zero.decoder, load_decoder(swarm.store.path(0)))
    assert same_weights(versions.get(1, lease).decoder, load_decoder(swarm.store.path(1)))
    assert two.tokenizer is zero.tokenizer


def test_other_weights_than_leased_are_not_used(swarm: Swarm, origin: str) -> None:
    with pytest.raises(CannotCheck, match="does not have the weights that the lease names"):
        make_versions(swarm).get(0, lease_on(swarm, origin, digest="1" * 64))


def test_a_manifest_of_another_run_key_is_not_used(swarm: Swarm, origin: str) -> None:
    with pytest.raises(CannotCheck, match="is not available"):
        make_versions(swarm, run_key=Key.generate().public).get(0, lease_on(swarm, origin))


def test_an_unpublished_version_is_not_available(swarm: Swarm, origin: str) -> None:
    with pytest.raises(CannotCheck, match="policy version 3 is not available"):
        make_versions(swarm).get(3, lease_on(swarm, origin))


def test_versions_in_memory_follow_from_what_is_free(
    swarm: Swarm, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions, lease = make_versions(swarm, max_loaded=None), lease_on(swarm, origin)
    monkeypatch.setattr(loaded_versions, "free_bytes", lambda _: 1000)
    zero = versions.get(0, lease)
    assert versions.get(1, lease).decoder is zero.decoder, "there is no room for a second one"
    monkeypatch.setattr(loaded_versions, "free_bytes", lambda _: 1 << 40)
    assert versions.get(2, lease).decoder is not zero.decoder


def test_a_version_that_does_not_fit_beside_the_others_takes_the_place_of_one(
    swarm: Swarm, origin: str
) -> None:
    def load(folder: Path) -> Model:
        if loaded:
            raise torch.OutOfMemoryError("another process took it")
        loaded.append(load_decoder(folder))
        return loaded[0]

    loaded: list[Model] = []
    versions, lease = make_versions(swarm, load=load), lease_on(swarm, origin)
    assert versions.get(0, lease).decoder is versions.get(1, lease).decoder is loaded[0]
    assert same_weights(loaded[0], load_decoder(swarm.store.path(1)))


def test_time_and_batches_follow_from_the_size_of_the_model(
    swarm: Swarm, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fetch_seconds(10**6) == 120 and fetch_seconds(65 * 10**9) == 13_000
    decoder = make_versions(swarm).get(0, lease_on(swarm, origin)).decoder
    per_token = 4 * (2 * 256 + 4 * 128)
    monkeypatch.setattr(loaded_versions, "free_bytes", lambda _: 2 * 1000 * per_token)
    assert tokens_that_fit(decoder, 4096) == 1000
    assert tokens_that_fit(decoder, 700) == 700
    monkeypatch.setattr(loaded_versions, "free_bytes", lambda _: 0)
    assert tokens_that_fit(decoder, 4096) == 512


def test_the_newest_version_is_fetched_beside_the_checks(
    swarm: Swarm, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_versions, "WATCH_S", 0.01)
    versions, lease = make_versions(swarm), lease_on(swarm, origin)
    versions.get(0, lease)
    client = swarm.client_of(swarm.key("validator"))
    fetching = BackgroundTask("fetch ahead", partial(versions.watch, client))
    end_s = time.monotonic() + 30
    while not (swarm.dir / "versions" / "v2").is_dir():
        assert time.monotonic() < end_s and not fetching.done
        time.sleep(0.01)
    client.stop.set()
    assert fetching.wait(30)
    fetching.result()
    nowhere = lease.model_copy(update={"relays": ()})
    assert same_weights(versions.get(2, nowhere).decoder, load_decoder(swarm.store.path(2)))


def test_an_idle_validator_loads_what_was_fetched_ahead(swarm: Swarm, origin: str) -> None:
    versions, lease = make_versions(swarm), lease_on(swarm, origin)
    versions.load_ahead()  # nothing is fetched yet
    zero = versions.get(0, lease)
    client = swarm.client_of(swarm.key("validator"))

    def fetch_ahead(version: int) -> None:
        held = swarm.store.get(version)
        assert held is not None
        assert versions._fetch_before_claims(held.sealed, RelayChoice(()), client.stop)

    fetch_ahead(1)
    with versions._fetch_lock:
        versions.load_ahead()
    assert list(versions._loaded) == [0], "it does not wait for another fetch"
    versions.load_ahead()
    assert list(versions._loaded) == [0, 1]
    nowhere = lease.model_copy(update={"relays": ()})
    assert same_weights(versions.get(1, nowhere).decoder, load_decoder(swarm.store.path(1)))
    fetch_ahead(2)
    versions.load_ahead()
    assert versions.get(2, nowhere).decoder is zero.decoder, "version 0 was used least"
    with pytest.raises(CannotCheck, match="does not have the weights that the lease names"):
        versions.get(2, lease_on(swarm, origin, digest="1" * 64))


def load_first_and_fetch_next(swarm: Swarm, versions: LoadedVersions, lease: Lease) -> None:
    """Loads version 0 for a claim, and fetches version 1 ahead of one."""
    versions.get(0, lease)
    held = swarm.store.get(1)
    assert held is not None
    client = swarm.client_of(swarm.key("validator"))
    assert versions._fetch_before_claims(held.sealed, RelayChoice(()), client.stop)


def test_the_only_version_in_memory_is_not_replaced_ahead_of_a_claim(swarm: Swarm, origin: str) -> None:
    versions, lease = make_versions(swarm, max_loaded=1), lease_on(swarm, origin)
    load_first_and_fetch_next(swarm, versions, lease)
    versions.load_ahead()
    assert list(versions._loaded) == [0]


def test_a_version_that_cannot_be_loaded_ahead_ends_nothing(swarm: Swarm, origin: str) -> None:
    versions, lease = make_versions(swarm), lease_on(swarm, origin)
    load_first_and_fetch_next(swarm, versions, lease)
    shutil.rmtree(swarm.dir / "versions" / "v1")
    versions.load_ahead()
    assert list(versions._loaded) == [0]


def test_other_weights_under_the_same_number_are_not_loaded_ahead(swarm: Swarm, origin: str) -> None:
    """A trainer that crashed published version 1 again: the manifest that was fetched ahead does not describe the folder any more."""
    versions, lease = make_versions(swarm), lease_on(swarm, origin)
    load_first_and_fetch_next(swarm, versions, lease)
    versions.get(2, lease)
    folder = swarm.dir / "versions"
    shutil.rmtree(folder / "v1")
    shutil.copytree(folder / "v2", folder / "v1")
    versions.load_ahead()
    assert list(versions._loaded) == [0, 2]


def test_a_claim_stops_the_fetch_ahead_of_another_version(swarm: Swarm, origin: str) -> None:
    versions, lease = make_versions(swarm), lease_on(swarm, origin)
    ahead = loaded_versions._FetchAhead(2, LinkedEvent(threading.Event()))
    versions._fetch_ahead = ahead
    versions._fetch_lock.acquire()

    def fetch() -> None:
        assert ahead.stop.wait(10)
        versions._fetch_lock.release()

    fetching = BackgroundTask("fetch ahead", fetch)
    assert versions.get(1, lease).version == 1
    assert fetching.wait(10) and ahead.stop.is_set()
    fetching.result()
