"""Builds the OpenAPI document that /openapi.json serves, from the same tables that define the routes."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic.json_schema import models_json_schema

import shoal
from shoal.swarm.coordinator.http.router import PublicRoute, SignedRoute
from shoal.swarm.coordinator.membership.admin_actions import ACTIONS
from shoal.wire.codes import CODES
from shoal.wire.messages import ProblemDetails
from shoal.wire.page_data import Curve, Snapshot
from shoal.wire.record import Record

HEX_32, HEX_64 = "^[0-9a-f]{32}$", "^[0-9a-f]{64}$"
PARAMETERS: dict[str, dict[str, Any]] = {
    "lease_id": {"type": "string", "pattern": HEX_32},
    "node": {"type": "string", "pattern": HEX_64},
    "name": {"type": "string", "pattern": HEX_64},
    "version": {"type": "integer", "minimum": 0, "maximum": 999999999},
    "action": {"type": "string", "enum": list(ACTIONS)},
}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999999999999999}
TEXT = {"type": "string", "maxLength": 200}
BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

Schemas = Mapping[type[Record], dict[str, Any]]


def document(signed: Iterable[SignedRoute], public: Mapping[str, PublicRoute]) -> str:
    """Returns the document as JSON."""
    signed = tuple(signed)
    used = {kind for route in signed for kind in (route.takes, route.gives) if kind is not None}
    used |= {route.gives for route in public.values()} | {ProblemDetails, Snapshot, Curve}
    wanted = [(kind, "validation") for kind in sorted(used, key=lambda kind: kind.__name__)]
    references, whole = models_json_schema(wanted, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schemas: Schemas = {kind: reference for (kind, _), reference in references.items()}  # type: ignore[misc]
    paths: dict[str, dict[str, Any]] = {}
    for route in signed:
        paths.setdefault(route.path, {})[route.method.lower()] = _signed(route, schemas)
    for path, view in public.items():
        paths.setdefault(path, {})["get"] = _public(path, view, schemas)
    curve = _operation("/v1/curve", "the steps from version `first` to `last`", _json(schemas[Curve]))
    curve["parameters"] = [{"name": name, "in": "query", "schema": NUMBER} for name in ("first", "last")]
    paths["/v1/curve"] = {"get": curve}
    paths["/v1/page"] = {"get": _operation("/v1/page", "all data of the page", _json(schemas[Snapshot]))}
    paths["/v1/objects/{name}"]["put"] = _upload()
    return json.dumps(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Shoal coordinator",
                "version": shoal.__version__,
                "description": "Routes for people and monitoring (/, /metrics, /v1/events) are not described here.",
            },
            "paths": paths,
            "components": {
                "schemas": whole["$defs"],
                "responses": {"Problem": _problem(schemas[ProblemDetails])},
                "securitySchemes": {
                    "signature": {
                        "type": "http",
                        "scheme": "signature",
                        "description": "RFC 9421 with Ed25519 and a fixed set of components: docs/wire/request.md",
                    }
                },
            },
        }
    )


def _signed(route: SignedRoute, schemas: Schemas) -> dict[str, Any]:
    callers = " or ".join(sorted(route.callers))
    content = BYTES if route.gives is None else _json(schemas[route.gives])
    operation = _operation(route.path, f"{callers}: {route.act.__name__}", content)
    operation |= {"security": [{"signature": []}], "x-callers": sorted(route.callers)}
    if route.gives is None:
        operation["responses"]["307"] = {"description": "the object is at the URL in Location"}
    if route.takes is not None:
        operation["requestBody"] = {"required": True, "content": _json(schemas[route.takes])}
    return operation


def _public(path: str, view: PublicRoute, schemas: Schemas) -> dict[str, Any]:
    schema = schemas[view.gives]
    operation = _operation(
        path, view.gives.__name__, _json({"type": "array", "items": schema} if view.many else schema)
    )
    operation["parameters"] += [{"name": name, "in": "query", "schema": NUMBER} for name in view.query]
    operation["parameters"] += [{"name": name, "in": "query", "schema": TEXT} for name in view.texts]
    return operation


def _upload() -> dict[str, Any]:
    operation = _operation(
        "/v1/objects/{name}", "unsigned: uploads the bytes under a name from POST .../upload", {}
    )
    operation["requestBody"] = {"required": True, "content": BYTES}
    operation["responses"] = {"204": {"description": "stored"}, "default": operation["responses"]["default"]}
    return operation


def _operation(path: str, summary: str, content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "summary": summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": schema}
            for name, schema in PARAMETERS.items()
            if f"{{{name}}}" in path
        ],
        "responses": {
            "200": {"description": "done", "content": content},
            "default": {"$ref": "#/components/responses/Problem"},
        },
    }


def _problem(schema: Mapping[str, Any]) -> dict[str, Any]:
    codes = ", ".join(code for code in CODES if code.startswith("request."))
    return {
        "description": f"the request was refused and nothing changed; code is one of {codes}",
        "content": {"application/problem+json": {"schema": schema}},
    }


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
