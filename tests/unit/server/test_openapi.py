from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from hodei.server.errors import STATUSES
from hodei.server.openapi import openapi
from hodei.server.route import PUBLIC
from hodei.server.routes import route_table

TABLE = route_table()
DOCUMENT = json.loads(msgspec.json.encode(openapi(TABLE)))


def refs(value):
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from refs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from refs(inner)


def test_the_document_has_every_route_and_nothing_else(call):
    document = call("GET", "/api/v1/openapi.json", role="").json
    assert document == DOCUMENT
    assert document["openapi"] == "3.1.0"
    listed = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert listed == {(route.method, route.path) for route in TABLE}


@pytest.mark.parametrize("route", TABLE, ids=lambda route: f"{route.method} {route.path}")
def test_each_operation_has_its_errors_policy_and_parameters(route):
    operation = DOCUMENT["paths"][route.path][route.method.lower()]
    assert operation["responses"]["default"] == {"$ref": "#/components/responses/Problem"}
    assert str(route.status) in operation["responses"]
    assert operation["x-policy"] == route.policy.name
    assert (operation.get("security") == []) == (route.policy is PUBLIC)
    in_path = {p["name"] for p in operation.get("parameters", []) if p["in"] == "path"}
    assert in_path == set(re.findall(r"\{(\w+)\}", route.path))


def test_every_reference_resolves():
    for ref in refs(DOCUMENT):
        target = DOCUMENT
        for part in ref.removeprefix("#/").split("/"):
            assert part in target, ref
            target = target[part]


def test_the_reference_names_every_route_and_every_code():
    text = (Path(__file__).parents[3] / "docs/reference/api.md").read_text()
    for route in TABLE:
        last = route.path.removeprefix("/api/v1").rpartition("/")[2] or "root"
        assert last in text, route.path
    for kind, status, _ in STATUSES:
        assert f"| {status} |" in text
        assert f"`{kind.code}`" in text


def test_operation_ids_are_distinct():
    names = [operation["operationId"] for methods in DOCUMENT["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))
