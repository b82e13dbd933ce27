"""Malicious documents are refused quickly, with a short and clear message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hodei.jobfile.parse import decode_jobs, parse_job, parse_jobs
from hodei.jobfile.schema import FlatJob, FullJob, JobKeys, TaskForm
from hodei.model.errors import InvalidInput
from hodei.model.job import JobSpec

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)
JSON, YAML = "application/json", "application/yaml"


@pytest.mark.parametrize(
    ("raw", "content_type", "text"),
    [
        (b"[" * 400_000, JSON, "deep"),
        (b'{"a":' * 100_000, JSON, "deep"),
        (b'{"name":"' + b"x" * 10_000_000 + b'","command":"x"}', JSON, "name: too long"),
        (b'{"name":"x","command":"' + b"x" * 10_000_000 + b'"}', JSON, "command: too long"),
        (b'{"' + b"x" * 10_000_000 + b'":1,"command":"x"}', JSON, "unknown key"),
        (b"[" + b"1," * 5_000_000 + b"1]", JSON, "values at once"),
        (b"[" + b"1," * 9_000 + b"1]", JSON, "expected a mapping"),
        (b"[" + b"{}," * 20_000 + b"{}]", JSON, "at most 10000"),
        (b" " * (17 * 2**20), JSON, "16 MiB"),
        (b'{"command":"x","cpu":NaN}', JSON, "not JSON"),
        (b'{"command":"x","cpu":1e999}', JSON, "not JSON"),
        (b'{"command":"x","cpu":' + b"9" * 5000 + b"}", JSON, ""),
        (b'{"command":"x","cpu":"' + b"9" * 5000 + b'"}', JSON, "too long"),
        (b'{"command":"\\ud800"}', JSON, "not JSON"),
        (b'{"command":"\xff"}', JSON, ""),
        (b'{"command":"x\\u0000"}', JSON, "NUL"),
        (b"", JSON, "not JSON"),
        (b"null", JSON, "expected a mapping, got nothing"),
        (b"\x00\x01\x02", YAML, "not allowed"),
        (b"[" * 1_000_000, YAML, "levels deep"),
        (b"- " * 400_000, YAML, "levels deep"),
        (b"{a: " * 200_000, YAML, "levels deep"),
        (b"[1, " + b"[[], " * 100_000, YAML, "levels deep"),
        (b"x" * 2_000_000, YAML, "larger than"),
        (b"- a\n" * 250_000, YAML, "values"),
        (b"---\n" * 250_000, YAML, "values"),
        (LAUGHS.encode(), YAML, "values"),
        (b"a: &a [*a]", YAML, "itself"),
        (b"a: &a {b: *a}", YAML, "itself"),
        (b"command: &c " + b"x" * 130_000 + b"\nannotations: {" + b",".join(b"a%d: *c" % i for i in range(200)) + b"}",
         YAML, "128 KiB"),
        (b"command: [&c " + b"x" * 130_000 + b", *c" * 4000 + b"]", YAML, "128 KiB"),
        (b"!!python/object/apply:os.system [ls]", YAML, "tag"),
        (b"x", "image/png", "cannot read"),
    ],
    ids=["deep lists", "deep mappings", "a name of 10 MB", "a command of 10 MB", "a key of 10 MB", "five million numbers",
         "nine thousand wrong jobs", "too many jobs", "17 MiB of blanks", "NaN", "beyond floats", "a number of 5000 digits",
         "an amount of 5000 digits", "half a surrogate", "not UTF-8", "NUL", "nothing", "null", "binary yaml",
         "deep yaml lists", "deep yaml blocks", "deep yaml mappings", "deep yaml mix", "large yaml", "many yaml values",
         "many yaml documents", "billion laughs", "a cycle", "a cycle of mappings", "one text many times",
         "one argument many times", "a python object", "another type"],
)  # fmt: skip
def test_a_malicious_document_is_refused_quickly_with_a_short_message(raw: bytes, content_type: str, text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        decode_jobs(raw, content_type)
    error = caught.value
    assert text in error.message
    assert len(error.message) < 1200
    assert sum(len(path) + len(text) for path, text in error.problems) < 60_000
    assert (error.message + "".join(path + text for path, text in error.problems)).isprintable()


KEYS = [
    *(field for form in (FlatJob, FullJob, JobKeys, TaskForm) for field in form.__struct_encode_fields__),
    "type", "requests", "limits", "cpu", "required", "nodeAffinity", "key", "operator", "lat",
]  # fmt: skip
WORDS = ["hodei/v1", "Job", "batch", "high", "500m", "8Gi", "1h", "a=b", "x:NoSchedule", "any", "2030-01-01T00:00:00Z"]
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(WORDS)
)  # fmt: skip
junk = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner),
    max_leaves=25,
)


def outcome(read: Callable[[], object]) -> Any:
    """The specs, or the InvalidInput; any other exception fails the test."""
    try:
        return read()
    except InvalidInput as error:
        return error


@settings(max_examples=150, deadline=None)
@given(junk)
def test_any_data_is_a_job_or_invalid_and_nothing_else(data: Any) -> None:
    for read in (parse_job, parse_jobs):
        found = outcome(lambda read=read: read(data))
        assert isinstance(found, JobSpec | list) or len(found.message) < 1200


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(FlatJob.__struct_encode_fields__), junk, max_size=6))
def test_any_values_of_known_keys_are_a_job_or_invalid(data: dict[str, Any]) -> None:
    found = outcome(lambda: parse_job({"command": "x", **data}))
    assert isinstance(found, JobSpec) or found.problems


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200) | st.text(alphabet="{}[]:,-&*!|>'\"# \n\tab1", max_size=60).map(str.encode))
def test_any_bytes_are_jobs_or_invalid(raw: bytes) -> None:
    for content_type in (JSON, YAML):
        found = outcome(lambda kind=content_type: decode_jobs(raw, kind))
        assert isinstance(found, list) or found.message
