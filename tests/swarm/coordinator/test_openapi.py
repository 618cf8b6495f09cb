"""The description of the routes at /openapi.json: it lists exactly the existing routes, and the answers match it."""

import inspect
import json
import os
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_swarm import CONFIG, Node, SmallSwarm
from sqlalchemy import select
from starlette.routing import Route

from shoal.swarm.coordinator.http.live_page import PAGE_FILES
from shoal.swarm.coordinator.http.routes import SIGNED_ROUTES
from shoal.swarm.coordinator.http.server import RunApp
from shoal.swarm.coordinator.store.schema import nodes
from shoal.wire.keys import Key
from shoal.wire.messages import Enrol
from shoal.wire.record import Record
from shoal.wire.request import Target, sign_request
from shoal.wire.run_spec import PROTOCOL

pytestmark = pytest.mark.integration

FOR_PEOPLE = {"/metrics", "/v1/events", "/openapi.json", *PAGE_FILES}
EXAMPLES = int(os.environ.get("SHOAL_OPENAPI_EXAMPLES", "3"))
"""Generated requests for each operation."""


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallSwarm]:
    config = CONFIG.model_copy(update={"requests_per_s": 1e6, "lease_s": 1e6})
    swarm = SmallSwarm(tmp_path_factory.mktemp("openapi"), config, on_socket=True)
    swarm.start()
    yield swarm
    swarm.close()


def test_every_route_is_described(busy: SmallSwarm) -> None:
    described = busy.public.get("/openapi.json").json()
    routes = {
        (route.path, method.lower())
        for route in RunApp(busy.coordinator).public.routes
        if isinstance(route, Route) and route.path not in FOR_PEOPLE
        for method in route.methods or ()
        if method != "HEAD"
    } | {(route.path, route.method.lower()) for route in SIGNED_ROUTES}
    routes.add(("/v1/objects/{name}", "put"))  # receiving.py's
    assert {(path, method) for path, item in described["paths"].items() for method in item} == routes
    # Every reference leads somewhere.
    text = json.dumps(described)
    for name in {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in described["components"]["schemas"]


@pytest.mark.parametrize("route", SIGNED_ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_the_table_names_the_records_of_the_function(route: Any) -> None:
    """A function takes the transaction, the coordinator, the path's variable part and the record, and returns the answer's record."""
    signature = inspect.signature(route.act, eval_str=True)
    annotations = [parameter.annotation for parameter in signature.parameters.values()]
    records = [kind for kind in annotations if inspect.isclass(kind) and issubclass(kind, Record)]
    assert records == ([] if route.takes is None else [route.takes])
    assert len(annotations) == 2 + ("{" in route.path) + (route.takes is not None)
    if route.gives is not None:
        assert signature.return_annotation is route.gives


class Signed(requests.auth.AuthBase):
    """Signs every request just before it is sent."""

    def __init__(self, key: Key) -> None:
        self._key = key

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        parts = urlsplit(request.url or "")
        target = Target(
            method=request.method or "",
            authority=str(parts.netloc),
            path=str(parts.path),
            query=str(parts.query),
        )
        body = request.body or b""
        content = body.encode() if isinstance(body, str) else body
        assert isinstance(content, bytes)
        request.headers.update(sign_request(self._key, target, content, now_s=time.time()))
        return request


class Callers:
    """Keys of every role and leases in several states, so that requests get past authentication."""

    def __init__(self, swarm: SmallSwarm) -> None:
        self.swarm, self.node = swarm, swarm.node()
        self.roles = {
            role: Key.load(swarm.dir / "keys" / f"{role}.key")
            for role in ("trainer", "validator", "relay", "admin")
        }
        other = swarm.node()
        delivered = other.deliver()
        self._leases = [self.node.lease().lease_id, delivered.lease_id]
        """An open lease and a submitted one."""
        self.keys = [self.node.client.key, other.client.key, Key.generate(), *self.roles.values()]

    def choose(self, wanted: list[str], data: st.DataObject) -> list[Key]:
        """Returns a key that is allowed and two arbitrary ones."""
        right = [self.roles.get(caller, self.node.client.key) for caller in wanted] or self.keys
        return [data.draw(st.sampled_from(right)), *data.draw(st.permutations(self.keys))[:2]]

    def values(self) -> dict[str, list[Any]]:
        """Returns values of parameters and fields that are valid at this moment."""
        with self.swarm.coordinator.database.read() as db:
            epoch = db.execute(select(nodes.c.session_epoch).where(nodes.c.node == self.node.id)).scalar_one()
        return {
            "lease_id": self._leases,
            "node": [self.node.id],
            "version": [0, 1],
            "epoch": [epoch],
            "protocol": [PROTOCOL],
            "policy_version": [0],
        }


@pytest.fixture(scope="module")
def callers(busy: SmallSwarm) -> Callers:
    return Callers(busy)


def operations(url: str) -> list[Any]:
    schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    return [found.ok() for found in schema.get_all_operations()]


@pytest.mark.timeout(120 + 60 * EXAMPLES)
def test_answers_match_the_description(busy: SmallSwarm, callers: Callers) -> None:
    """Checks that the status is no 5xx, and that status, type and body match the description."""
    answered = {
        f"{operation.method.upper()} {operation.path}": ask(operation, busy.url, callers)
        for operation in operations(busy.url)
    }
    print(answered)  # noqa: T201 - shown with -s
    seen = set().union(*answered.values())
    assert seen & {200, 204} and not {status for status in seen if status >= 500}, answered
    assert all(answered.values()), answered


def ask(operation: Any, url: str, callers: Callers) -> set[int]:
    """Sends generated requests, checks each answer against the description, and returns the statuses."""
    from schemathesis import GenerationMode, checks
    from schemathesis.specs.openapi import checks as conformance

    wanted = [
        checks.not_a_server_error,
        conformance.status_code_conformance,
        conformance.content_type_conformance,
        conformance.response_schema_conformance,
    ]
    statuses: set[int] = set()
    wanted_callers = operation.definition.raw.get("x-callers", [])
    modes = [GenerationMode.POSITIVE]
    if operation.body:
        modes.append(GenerationMode.NEGATIVE)  # what the description forbids

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def attempt(data: st.DataObject) -> None:
        mode = data.draw(st.sampled_from(modes))
        case = data.draw(operation.as_strategy(generation_mode=mode))
        _aim(case, callers.values(), data)
        for key in callers.choose(wanted_callers, data):
            answer = case.call(base_url=url, auth=Signed(key), timeout=30)
            statuses.add(answer.status_code)
            case.validate_response(answer, checks=wanted)

    attempt()
    return statuses


def _aim(case: Any, values: dict[str, list[Any]], data: st.DataObject) -> None:
    """Replaces parameters and fields by valid values in half of the requests."""
    if not data.draw(st.booleans()):
        return
    for name in case.path_parameters or {}:
        if name in values:
            case.path_parameters[name] = data.draw(st.sampled_from(values[name]))
    for name in values if isinstance(case.body, dict) else ():
        if name in case.body:
            case.body[name] = data.draw(st.sampled_from(values[name]))


def test_the_hook_signs_what_is_sent(busy: SmallSwarm) -> None:
    node = Node(busy.url, Key.generate())
    ask = Enrol(protocol=1, software="test").model_dump_json().encode()
    answer = requests.post(f"{busy.url}/v1/enrol", data=ask, auth=Signed(node.client.key), timeout=30)
    assert answer.json()["node"] == node.id
    node.client.close()
