"""The published schema agrees with the reader, and the examples and the reference page agree with both."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hodei.jobfile.parse import parse_job
from hodei.jobfile.schema import (
    AffinityForm,
    BackendForm,
    FlatJob,
    FullJob,
    JobKeys,
    Metadata,
    NearForm,
    TaskForm,
    job_schema,
)
from hodei.jobfile.sections.gang import CheckpointForm, DistributionForm, GangForm, TopologyForm, TransferCostForm
from hodei.jobfile.yaml_reader import load_yaml

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
PAGE = ROOT / "docs" / "reference" / "job-file.md"
FULL_KEYS = {"apiVersion", "kind", "metadata", "spec"}


def fits(data: Any, schema: dict[str, Any]) -> bool:
    """A small part of JSON Schema: types, properties, unions, references, enumerations."""
    if "$ref" in schema and not fits(data, job_schema()["$defs"][schema["$ref"].rpartition("/")[2]]):
        return False
    if "anyOf" in schema and not any(fits(data, option) for option in schema["anyOf"]):
        return False
    if not all(fits(data, part) for part in schema.get("allOf", ())):
        return False
    if "if" in schema and not fits(data, schema["then" if fits(data, schema["if"]) else "else"]):
        return False
    if "enum" in schema and data not in schema["enum"]:
        return False
    if "const" in schema and data != schema["const"]:
        return False
    kinds: dict[str, Any] = {
        "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int,
        "number": (int, float),
    }  # fmt: skip
    if "type" in schema and not isinstance(data, kinds[schema["type"]]):
        return False
    if isinstance(data, list):
        return all(fits(item, schema.get("items", {})) for item in data)
    if isinstance(data, dict):
        if not all(key in data for key in schema.get("required", ())):
            return False
        additional = schema.get("additionalProperties", True)
        for key, value in data.items():
            inner = schema.get("properties", {}).get(key, additional)
            if inner is False or (isinstance(inner, dict) and not fits(value, inner)):
                return False
    return True


def documents() -> list[Any]:
    found = []
    for path in EXAMPLES:
        for i, document in enumerate(load_yaml(path.read_bytes(), name=path.name)):
            found.append(pytest.param(document, id=f"{path.name} {i + 1}"))
    for i, block in enumerate(re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)):
        for document in load_yaml(block, name=f"{PAGE.name}, block {i + 1}"):
            found.append(pytest.param(document, id=f"{PAGE.name} block {i + 1}"))
    return found


@pytest.mark.parametrize("document", documents())
def test_examples_are_jobs_and_fit_the_schema_and_a_wrong_key_does_not(document: dict[str, Any]) -> None:
    parse_job(document)
    assert fits(document, job_schema())
    assert not fits({**document, "bogus": 1}, job_schema())
    if "spec" in document:
        tasks = [{**document["spec"]["tasks"][0], "bogus": 1}]
        assert not fits({**document, "spec": {**document["spec"], "tasks": tasks}}, job_schema())


def test_the_examples_of_the_readme_exist() -> None:
    assert {path.stem for path in EXAMPLES} >= {"hello", "pipeline", "gang", "gpu", "retry"}


def test_every_object_of_the_schema_is_closed_and_described() -> None:
    schema = job_schema()
    assert schema["$schema"].endswith("2020-12/schema")
    assert schema["$id"]
    for name, definition in schema["$defs"].items():
        assert definition["additionalProperties"] is False, name
        assert definition["description"], name
    for name in ("FlatJob", "JobKeys", "TaskForm", "Metadata"):
        for key, value in schema["$defs"][name]["properties"].items():
            assert "description" in value, f"{name}.{key}"
    assert msgspec.json.decode(msgspec.json.encode(schema)) == schema


def test_the_schema_has_both_spellings() -> None:
    assert fits({"command": "x", "nodeSelector": {"a": "b"}}, job_schema())
    full = {"api_version": "hodei/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": {"tasks": [{"command": "x"}]}}
    assert fits(full, job_schema())
    del full["api_version"]
    assert not fits(full, job_schema())


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("min", 2, "2"),
        ("backends", ["a"], "a"),
        ("binding", "numa", "socket"),
        ("gang", {"topology": {"key": "rack", "required": False}, "elastic": True}, {"topolgy": "rack"}),
        ("distribution", {"model": "colocated"}, {"model": "together"}),
        ("checkpoint", {"command": "save", "timeout": "30s"}, {"signl": "USR1"}),
    ],
    ids=["min", "backends", "binding", "gang", "distribution", "checkpoint"],
)
def test_the_schema_has_the_keys_of_gangs(key: str, good: Any, bad: Any) -> None:
    assert fits({"command": "x", key: good}, job_schema())
    assert not fits({"command": "x", key: bad}, job_schema())


def test_both_forms_of_a_job_have_the_same_keys_of_a_job() -> None:
    keys_of_the_job = set(JobKeys.__struct_encode_fields__) - {"tasks"}
    assert keys_of_the_job <= set(FlatJob.__struct_encode_fields__)
    types = {form: form.__annotations__ for form in (FlatJob, JobKeys)}
    assert {types[FlatJob][key] == types[JobKeys][key] for key in keys_of_the_job} == {True}


@pytest.mark.parametrize(
    "form",
    [
        FlatJob,
        FullJob,
        Metadata,
        JobKeys,
        TaskForm,
        AffinityForm,
        BackendForm,
        NearForm,
        GangForm,
        TopologyForm,
        DistributionForm,
        TransferCostForm,
        CheckpointForm,
    ],
    ids=lambda f: f.__name__,
)
def test_the_reference_page_names_every_key(form: type[msgspec.Struct]) -> None:
    page = PAGE.read_text()
    missing = [key for key in form.__struct_encode_fields__ if f"`{key}`" not in page]
    assert missing == []
