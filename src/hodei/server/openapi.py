"""The OpenAPI 3.1 document, generated from the route table and its types."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from hodei import __version__
from hodei.api.views import Problem
from hodei.jobfile.schema import job_schema
from hodei.server.route import PUBLIC, Param, Route

_REF = "#/components/schemas/{name}"


def openapi(table: Sequence[Route]) -> dict[str, Any]:
    types = [Problem]
    for route in table:
        types += [kind for kind in (route.request, route.response) if kind not in (None, bytes, *types)]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(types, schemas, strict=True))
    components["JobDocument"] = _embedded(job_schema(), components)
    paths: dict[str, dict[str, Any]] = {}
    for route in table:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Hodei", "version": __version__, "description": "One job scheduler for every place."},
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "responses": {
                "Problem": {"description": "What is wrong, and what to do next", **_json(schema_of[Problem])}
            },
        },
    }


def _operation(route: Route, schema_of: dict[Any, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": route.summary}
    if route.response is not None and route.response is not bytes:
        answer |= _json(schema_of[route.response])
    else:
        answer["content"] = {route.media_type: {"schema": {} if "json" in route.media_type else {"type": "string"}}}
    operation: dict[str, Any] = {
        "operationId": getattr(route.handler, "__name__", route.path),
        "summary": route.summary,
        "tags": [route.path.removeprefix("/api/v1").split("/")[1] or "root"],
        "x-policy": route.policy.name,
        "responses": {str(route.status): answer, "default": {"$ref": "#/components/responses/Problem"}},
    }
    if route.policy is PUBLIC:
        operation["security"] = []
    if route.params:
        operation["parameters"] = [_parameter(param) for param in route.params]
    if route.request is bytes:
        one = {"$ref": _REF.format(name="JobDocument")}
        many = {"type": "array", "items": one}
        wrapped = {"type": "object", "properties": {"jobs": many}, "required": ["jobs"]}
        schema = {"anyOf": [one, many, wrapped]}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}, "application/yaml": {"schema": schema}},
        }
    elif route.request is not None:
        operation["requestBody"] = _json(schema_of[route.request])
    return operation


def _parameter(param: Param) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer" if param.type is int else "string"}
    if param.type is int:
        schema |= {"minimum": param.minimum, "maximum": param.maximum}
    if param.choices:
        schema["enum"] = list(param.choices)
    if param.many:
        schema = {"type": "array", "items": schema}
    elif param.default is not UNSET and param.default not in (None, ""):
        schema["default"] = param.default
    required = param.where == "path" or (param.default is UNSET and not param.many)
    return {"name": param.name, "in": param.where, "required": required, "description": param.summary, "schema": schema}


def _json(schema: Any) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def _embedded(schema: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    """A standalone schema as part of this document: its definitions move to `components` under a prefix."""

    def rewrite_refs(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: re.sub(r"^#/\$defs/", "#/components/schemas/Job.", inner)
                if key == "$ref" and isinstance(inner, str)
                else rewrite_refs(inner)
                for key, inner in value.items()
            }
        return [rewrite_refs(inner) for inner in value] if isinstance(value, list) else value

    schema = dict(schema)
    for name, definition in schema.pop("$defs", {}).items():
        components[f"Job.{name}"] = rewrite_refs(definition)
    schema.pop("$schema", None)
    schema.pop("$id", None)
    embedded: dict[str, Any] = rewrite_refs(schema)
    return embedded
