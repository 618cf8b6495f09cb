"""Every route with bodies that are almost right, signed by every kind of key: nothing fails on our side, and nothing that is
refused leaves a trace."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_swarm import CONFIG, SmallSwarm, manifest, report
from starlette.routing import Route

from shoal.net.http_client import Refused, SignedClient, Unreachable
from shoal.swarm.coordinator.http.routes import SIGNED_ROUTES
from shoal.swarm.coordinator.http.server import RunApp
from shoal.swarm.coordinator.membership.admin_actions import ACTIONS
from shoal.wire.delegation import delegate
from shoal.wire.keys import Key
from shoal.wire.record import seal

ID, KEY = "0" * 32, "ab" * 32
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    2**53,
    2**64,
    1e308,
    0.5,
    "",
    "x",
    "\0",
    "\ud7ff",
    "é" * 400,
    [],
    {},
    [[]],
    {"a": 1},
]
odd = st.sampled_from(ODD) | st.text(max_size=20) | st.integers() | st.floats(allow_nan=False)


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    swarm = SmallSwarm(tmp_path_factory.mktemp("fuzz"), CONFIG)
    swarm.start()
    yield swarm
    swarm.close()


def bodies(swarm: SmallSwarm) -> dict[str, dict[str, Any]]:
    """Returns a valid body for each route that takes one."""
    sealed = seal(manifest(1), swarm.run_key).model_dump(mode="json")
    return {
        "/v1/enrol": {
            "protocol": 1,
            "software": "x",
            "invite": "",
            "work": "",
            "delegation": delegate(Key.generate(), KEY, now_s=1.0).model_dump(mode="json"),
        },
        "/v1/session": {"software": "x"},
        "/v1/heartbeat": {"epoch": 1, "phase": "x", "policy_version": 0, "tokens_per_s": 1.0},
        "/v1/leases": {"epoch": 1},
        "/v1/leases/{lease_id}/upload": {"epoch": 1, "num_bytes": 5, "sha256": "0" * 64},
        "/v1/leases/{lease_id}/submit": {
            "epoch": 1,
            "num_bytes": 5,
            "sha256": "0" * 64,
            "policy_version": 0,
        },
        "/v1/leases/{lease_id}/abandon": {"epoch": 1, "reason": "x"},
        "/v1/leases/{lease_id}/appeal": {"text": "x"},
        "/v1/leave": {"epoch": 1},
        "/v1/keys/revoke": {"node": KEY, "reason": "x"},
        "/v1/admin/{action}": {"reason": "because", "subject": KEY, "amount": 1},
        "/v1/checks/{lease_id}/verdict": {
            "lease_id": ID,
            "code": "accepted",
            "detail": "x",
            "rewards": [0.0, 1.0, 0.0, 1.0],
            "output_tokens": 8,
            "checks": "full",
            "evidence": {"a": 1},
        },
        "/v1/policies": {
            "manifest": sealed,
            "origin_url": "http://127.0.0.1:1",
            "report": report(1).model_dump(mode="json"),
        },
        "/v1/relays": {"url": "http://127.0.0.1:9", "versions": [0], "bytes_sent": 1},
    }


def mutate(body: Any, data: st.DataObject) -> Any:
    """Returns the body with one random error."""
    if not isinstance(body, dict) or not body or data.draw(st.integers(0, 9)) == 0:
        return data.draw(odd)
    name = data.draw(st.sampled_from(sorted(body)))
    how = data.draw(st.sampled_from(["replace", "deeper", "drop", "add"]))
    if how == "drop":
        return {key: value for key, value in body.items() if key != name}
    if how == "add":
        return {**body, data.draw(st.text(max_size=8)): data.draw(odd)}
    return {**body, name: mutate(body[name], data) if how == "deeper" else data.draw(odd)}


def send(client: SignedClient, method: str, path: str, content: bytes) -> int:
    try:
        return client.send(method, path, content).status_code
    except Refused as refused:
        assert refused.code != "request.failed", (method, path, content, refused.problem.detail)
        return 400
    except Unreachable as error:
        raise AssertionError(f"{method} {path} {content!r}: {error}") from None


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_body_makes_it_fail(busy: SmallSwarm, data: st.DataObject) -> None:
    swarm = busy
    node = swarm._nodes[0] if swarm._nodes else swarm.node()
    clients = [node.client, swarm.trainer, swarm.validator, swarm.relay, admin_of(swarm)]
    good = bodies(swarm)
    path = data.draw(st.sampled_from(sorted(good)))
    body = mutate(good[path], data)
    for name, choices in {
        "{lease_id}": [ID, "x", "..%2F..", "0" * 33],
        "{action}": [*ACTIONS, "dance"],
    }.items():
        path = path.replace(name, data.draw(st.sampled_from(choices)) if name in path else "")
    content = data.draw(st.just(json.dumps(body).encode("utf-8", "replace")) | st.binary(max_size=40))
    for client in clients:
        send(client, "POST", path, content)


def admin_of(swarm: SmallSwarm) -> SignedClient:
    if not hasattr(swarm, "admin"):
        node = swarm.stranger(Key.load(swarm.dir / "keys" / "admin.key"))
        swarm.admin = node.client  # type: ignore[attr-defined]
    return swarm.admin  # type: ignore[attr-defined, no-any-return]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from(
        ["/v1/nodes/", "/v1/policies/", "/v1/ledger?from_seq=", "/v1/ledger?limit=", "/v1/objects/", "/"]
    ),
    tail=st.text(
        alphabet=st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="#"), max_size=30
    ),
)
def test_no_address_makes_it_fail(busy: SmallSwarm, path: str, tail: str) -> None:
    assert busy.public.get(path + tail).status_code < 500
    assert busy.public.put(path + tail, content=b"x").status_code < 500


def test_every_route_is_tried(busy: SmallSwarm, tmp_path: Path) -> None:
    posts = {route.path for route in SIGNED_ROUTES if route.method == "POST"}
    unsigned = [route for route in RunApp(busy.coordinator).public.routes if isinstance(route, Route)]
    assert not any("POST" in (route.methods or ()) for route in unsigned)
    assert posts == set(bodies(busy)) | {"/v1/checks/claim", "/v1/tickets"}
