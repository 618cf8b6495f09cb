"""Versions are fetched once, swapped in place, and never believed without their digest."""

from collections.abc import Iterator

import pytest
import torch
from honest_work import make_lease, make_spec
from loopback import LOG, Swarm, origin_of
from torch import nn

from shoal.model.load_model import load_decoder
from shoal.swarm.validator.loaded_versions import LoadedVersions
from shoal.swarm.validator.recompute import CannotCheck
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


def make_versions(swarm: Swarm, *, run_key: str | None = None) -> LoadedVersions:
    return LoadedVersions(
        swarm.dir / "versions",
        swarm.client_of(swarm.key("validator")),
        run_key=run_key or swarm.key("run").public,
        load=load_decoder,
        max_loaded=2,
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
