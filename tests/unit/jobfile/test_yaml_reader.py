"""The YAML reader: plain scalars, refused documents, and error messages."""

from __future__ import annotations

import math

import pytest

from hodei.jobfile.yaml_reader import load_yaml
from hodei.model.errors import InvalidInput


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"), ("NO", "NO"), ("on", "on"), ("y", "y"), ("true", True), ("False", False),
        ("~", None), ("null", None), ("'null'", "null"),
        ("12", 12), ("-3", -3), ("0", 0), ("010", "010"), ("0o17", "0o17"), ("0x1f", "0x1f"), ("1_000", "1_000"),
        ("12:30:45", "12:30:45"), ("1.5", 1.5), (".5", 0.5), ("1e3", 1000.0), ("1.", 1.0), ("1.10", 1.1),
        ("2030-01-31", "2030-01-31"), ("2030-01-31T18:00:00Z", "2030-01-31T18:00:00Z"), ("1.2.3", "1.2.3"),
        ("-", None), ("500m", "500m"), ("8Gi", "8Gi"), ("=", "="), (".inf", math.inf), ("9" * 40, 10**40 - 1), ("9" * 400, "9" * 400),
        ("!!str 12", "12"), ("! 12", "12"), ("!!float 1", 1.0), ('"\\u00e9"', "é"), ("|\n  a\n  b\n", "a\nb\n"),
    ],
)  # fmt: skip
def test_a_plain_scalar_follows_yaml_1_2(text: str, value: object) -> None:
    expected = value if text != "-" else [None]
    assert load_yaml(f"key: {text}" if text != "-" else "key:\n-") == [{"key": expected}]


def test_a_file_may_hold_several_documents_and_empty_ones_do_not_count() -> None:
    assert load_yaml(b"\xef\xbb\xbfa: 1\n---\n# nothing\n---\n[b]\n...\n") == [{"a": 1}, ["b"]]
    assert load_yaml("") == []
    assert load_yaml("# only a comment\n") == []


@pytest.mark.parametrize(
    "text", ['{"a": [1, 2.5, "x", null, true]}', '{\n\t"a": [1, 2.5, "x",\n\t\tnull, true]\n}'], ids=["plain", "tabs"]
)
def test_json_is_read_too(text: str) -> None:
    assert load_yaml(text) == [{"a": [1, 2.5, "x", None, True]}]


def test_json_strings_may_have_surrogate_pairs() -> None:
    assert load_yaml('{"a": "\\ud83d\\ude00"}') == [{"a": "\N{GRINNING FACE}"}]


def test_anchors_and_merge_keys_work() -> None:
    text = "base: &b {cpu: 1, memory: 1Gi}\none: *b\ntwo: {<<: *b, cpu: 2}\nthree: {<<: [*b, {x: y}]}\n"
    (data,) = load_yaml(text)
    base = {"cpu": 1, "memory": "1Gi"}
    assert data == {"base": base, "one": base, "two": {"cpu": 2, "memory": "1Gi"}, "three": {**base, "x": "y"}}


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "job.yaml:3:1", "the key 'a' appears twice"),
        ('{"a": 1, "a": 2}', "job.yaml:1:10", "the key 'a' appears twice"),
        ("a: b: c\n", "job.yaml:1:5", "put the value in quotes"),
        ("a:\n\t- b\n", "job.yaml:2:1", "spaces, not tabs"),
        ("a: 'x\n", "job.yaml:2:1", "not closed"),
        ("{a: 1", "job.yaml:", "not closed"),
        ("- a\nb: c\n", "job.yaml:2:1", "indentation"),
        ("a: *b\n", "job.yaml:1:4", "mark its target with &b"),
        ("a: &x [1, *x]\n", "job.yaml:1:11", "refers to itself"),
        ("a: !!python/name:os.system x\n", "job.yaml:1:4", "tag"),
        ("a: !!int x\n", "job.yaml:1:4", "tag"),
        ("[a, b]: c\n", "job.yaml:1:", "plain word as the key"),
        ("a: {<<: 1}\n", "job.yaml:1:9", "<< needs a mapping"),
        ("a: \x07\n", "job.yaml:1", "U+0007"),
        ("[" * 40, "job.yaml:1:33", "levels deep"),
        ("[" * 40 + "]" * 40, "job.yaml", "levels deep"),
        ("a: &a " + "[" * 20 + "]" * 20 + "\nb: " + "[" * 20 + "*a" + "]" * 20, "job.yaml:2:", "levels deep"),
        (b"a: \xff", "job.yaml", "UTF-8"),
    ],
    ids=["a key twice", "a json key twice", "a colon", "a tab", "an open quote", "an open brace", "mixed levels",
         "an unknown alias", "a cycle", "a python tag", "a wrong tag", "a list as key", "a bad merge", "a bell",
         "deep", "deep json", "deep by alias", "another encoding"],
)  # fmt: skip
def test_an_error_has_its_line_and_a_hint(text: str | bytes, where: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_yaml(text, name="job.yaml")
    ((path, problem),) = caught.value.problems
    assert path.startswith(where)
    assert message in problem
    assert caught.value.message.startswith(path)
    assert caught.value.hint


def test_without_a_name_the_line_and_column_are_given() -> None:
    with pytest.raises(InvalidInput, match=r"^line 2, column 1: the key 'a' appears twice$"):
        load_yaml("a: 1\na: 2\n")


def test_limits_can_be_chosen() -> None:
    with pytest.raises(InvalidInput, match="larger than 10 bytes"):
        load_yaml("a: 123456789", max_bytes=10)
    with pytest.raises(InvalidInput, match="more than 3 values"):
        load_yaml("[a, b, c]x", max_values=3)
    assert load_yaml("- 1\n" * 40_000, max_values=50_000) == [[1] * 40_000]
