"""The JSON Schema of job files, made from the same types that read them, for editors and other programs."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from hodei.jobfile.check import twins
from hodei.jobfile.schema import FlatJob, FullJob

SCHEMA_ID = "urn:hodei:schema:job:v1"


@cache
def job_schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of both forms. Kubernetes' spelling of a key stands beside ours. Not to be changed by callers."""
    _, components = msgspec.json.schema_components([FlatJob, FullJob], ref_template="#/$defs/{name}")
    definitions = {name: _with_twins(_tidy(definition, components)) for name, definition in components.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA_ID,
        "title": "Hodei job",
        "description": "A job in its short form (one task, all keys on one level) or its full form (one or more tasks).",
        "if": {"anyOf": [{"required": [key]} for key in ("apiVersion", "api_version", "kind", "metadata", "spec")]},
        "then": {"$ref": "#/$defs/FullJob"},
        "else": {"$ref": "#/$defs/FlatJob"},
        "$defs": definitions,
    }


def _tidy(part: Any, definitions: dict[str, Any]) -> Any:
    """Descriptions and examples out of `anyOf [..., null]`, where editors do not look for them."""
    if isinstance(part, list):
        return [_tidy(inner, definitions) for inner in part]
    if not isinstance(part, dict):
        return part
    part = {key: _tidy(inner, definitions) for key, inner in part.items() if not (key == "default" and inner is None)}
    options = part.get("anyOf")
    if isinstance(options, list) and len(options) == 2 and options[1] == {"type": "null"}:
        option = options[0]
        for key in ("description", "examples"):
            if key in option:
                part.setdefault(key, option.pop(key))
    if "description" not in part and (reference := part.get("$ref") or (options and options[0].get("$ref"))):
        part["description"] = definitions[reference.rpartition("/")[2]]["description"]
    return part


def _with_twins(definition: dict[str, Any]) -> dict[str, Any]:
    """Each key in its other spelling too; a required key is then required in one of the two."""
    properties = definition.get("properties")
    if not properties:
        return definition
    out = dict(definition, properties=dict(properties), additionalProperties=False)
    either = []
    for name in properties:
        for twin in twins(name):
            out["properties"][twin] = dict(properties[name], description=f"Another spelling of `{name}`.")
            if name in definition.get("required", ()):
                either.append({"anyOf": [{"required": [name]}, {"required": [twin]}]})
                out["required"] = [key for key in out["required"] if key != name]
    if either:
        out["allOf"] = either
    return out
