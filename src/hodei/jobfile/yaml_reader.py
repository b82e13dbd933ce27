"""YAML as people mean it: YAML 1.2's plain scalars, no surprises, every refusal with its place and a way out.

Built on PyYAML's events, not on its objects, so that depth, size and repetition are counted while reading: a hostile
file is refused before it is unfolded. JSON is read too. Knows nothing of jobs; those are read in `document`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from hodei.model.errors import InvalidInput

MAX_BYTES = 2**20
MAX_VALUES = 30_000
MAX_DEPTH = 32

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CONSTANTS = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
    ".nan": float("nan"), ".NaN": float("nan"), ".inf": float("inf"), ".Inf": float("inf"),
    "+.inf": float("inf"), "-.inf": float("-inf"),
}  # fmt: skip
# Numbers with leading zeros, underscores, colons or a base stay text: what they mean depends on whom you ask.
_WHOLE = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,29})")
_REAL = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]{0,29})?\.[0-9]{1,30}|(?:0|[1-9][0-9]{0,29})\.?)(?:[eE][-+]?[0-9]{1,4})?")
_TAG = "tag:yaml.org,2002:"
_TIPS = (
    ("mapping values are not allowed", "a ': ' inside a value: put the value in quotes, or check the indentation"),
    ("cannot start any token", "indent with spaces, not tabs; quote values that begin with @, ` or %"),
    ("did not find expected key", "check the indentation of this line and the one before"),
    ("expected '-' indicator", "check the indentation; a list and keys cannot stand on one level"),
    ("expected <block end>", "check the indentation; a list and keys cannot stand on one level"),
    ("unexpected end of stream", "a quote or bracket is not closed"),
    ("expected ',' or", "a bracket is not closed, or a comma is missing"),
    ("could not find expected ':'", "a ':' is missing after the key"),
)


def why_unreadable(name: str) -> str:
    """What to say of a file whose name tells that it is of another language; "" for all others."""
    return f"{name} is TOML, and job files are YAML or JSON" if name.lower().endswith(".toml") else ""


def load_yaml(
    text: str | bytes, *, name: str = "", max_bytes: int = MAX_BYTES, max_values: int = MAX_VALUES
) -> list[object]:
    """The documents of a file, empty ones left out. InvalidInput says `name`, line, column and what to do."""
    if len(text) > max_bytes:
        limit = f"{max_bytes // 1024} KiB" if max_bytes >= 1024 else f"{max_bytes} bytes"
        raise _refusal(name, "", f"larger than {limit}", "split the file")
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise _refusal(name, "", f"not UTF-8 (byte {error.start})", "save the file as UTF-8") from None
    text = text.removeprefix("\ufeff")
    if text.lstrip()[:1] in ("{", "["):
        try:
            return [_load_json(text, name)]
        except ValueError:
            pass  # not strictly JSON; the other reader knows where and why
    return list(_Reader(text, name, max_values).documents())


# ------------------------------------------------------------------------------------------- JSON


def _load_json(text: str, name: str) -> object:
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep(name, "") from None
    level = [data]
    for _ in range(MAX_DEPTH):
        level = [inner for one in level if isinstance(one, dict | list) for inner in _inside(one)]
        if not level:
            return data
    raise _too_deep(name, "")


def _inside(data: dict[str, Any] | list[Any]) -> list[Any]:
    return [one for one in (data.values() if isinstance(data, dict) else data) if isinstance(one, dict | list)]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("duplicate key")
    return out


def _no_constant(text: str) -> object:
    raise ValueError(text)


# ------------------------------------------------------------------------------------------- YAML


class _Open:
    """A list or mapping that is being read. `values` and `height` count everything inside, aliases unfolded."""

    __slots__ = ("anchor", "data", "has_key", "height", "is_key", "key", "merged", "plain_key", "values")

    def __init__(self, data: Any, anchor: str | None, is_key: bool) -> None:
        self.data, self.anchor, self.is_key = data, anchor, is_key
        self.has_key, self.key, self.plain_key = False, "", False
        self.values, self.height = 1, 1
        self.merged: list[dict[Any, Any]] = []


class _Reader:
    def __init__(self, text: str, name: str, max_values: int) -> None:
        self.text, self.name, self.max_values = text, name, max_values
        self.total = 0
        self.open: list[_Open] = []
        self.anchors: dict[str, tuple[Any, int, int] | None] = {}
        self.done: list[object] = []

    def documents(self) -> Iterator[object]:
        for event in self._events():
            kind = type(event)
            if kind is yaml.ScalarEvent:
                value = self._scalar(event)
                if event.anchor is not None:
                    self.anchors[event.anchor] = (value, 1, 0)
                self._put(value, 1, 0, event, event.implicit[0] and not event.style)
            elif kind is yaml.MappingStartEvent or kind is yaml.SequenceStartEvent:
                self._begin(event, {} if kind is yaml.MappingStartEvent else [])
            elif kind is yaml.MappingEndEvent or kind is yaml.SequenceEndEvent:
                self._end(event)
            elif kind is yaml.AliasEvent:
                self._alias(event)
            elif kind is yaml.DocumentStartEvent:
                self.anchors, self.done = {}, []
                self._count(1, event)
            elif kind is yaml.DocumentEndEvent and self.done[0] is not None:
                yield self.done[0]

    def _events(self) -> Iterator[Any]:
        try:
            loader = _Loader(self.text)
            try:
                while (event := loader.get_event()) is not None:
                    yield event
            finally:
                loader.dispose()
        except yaml.MarkedYAMLError as error:
            problem = error.problem or error.context or "not YAML"
            tip = next((tip for part, tip in _TIPS if part in problem), "check the line and the one before")
            raise self._no(problem, tip, error.problem_mark or error.context_mark) from None
        except yaml.reader.ReaderError as error:
            line = self.text.count("\n", 0, error.position) + 1
            what = f"the character U+{ord(str(error.character)[0]) if isinstance(error.character, str) else error.character:04X} is not allowed"
            raise _refusal(self.name, f"{line}", what, "remove it, or write it as an escape in quotes") from None
        except UnicodeEncodeError:
            raise _refusal(self.name, "", "half a surrogate pair, which is not text", "remove it") from None

    def _begin(self, event: Any, data: Any) -> None:
        if event.tag not in (None, "!", f"{_TAG}map" if isinstance(data, dict) else f"{_TAG}seq"):
            raise self._no(f"the tag {event.tag[:40]!r} is not allowed", "leave it out", event.start_mark)
        if len(self.open) >= MAX_DEPTH:
            raise _too_deep(self.name, self._place(event.start_mark))
        self._count(1, event)
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        self.open.append(_Open(data, event.anchor, False))

    def _end(self, event: Any) -> None:
        frame = self.open.pop()
        for other in frame.merged:
            for key, value in other.items():
                frame.data.setdefault(key, value)
        if frame.anchor is not None:
            self.anchors[frame.anchor] = (frame.data, frame.values, frame.height)
        self._put(frame.data, frame.values, frame.height, event, False, counted=True)

    def _alias(self, event: Any) -> None:
        if event.anchor not in self.anchors:
            raise self._no(
                f"*{event.anchor[:40]} refers to nothing",
                f"mark its target with &{event.anchor[:40]}",
                event.start_mark,
            )
        target = self.anchors[event.anchor]
        if target is None:
            raise self._no(
                f"*{event.anchor[:40]} refers to itself", "a document cannot contain itself", event.start_mark
            )
        value, values, height = target
        if len(self.open) + height > MAX_DEPTH:
            raise _too_deep(self.name, self._place(event.start_mark))
        self._put(value, values, height, event, False)

    def _put(self, value: Any, values: int, height: int, event: Any, plain: bool, *, counted: bool = False) -> None:
        """`value` is complete: into the list or mapping around it."""
        if not counted:
            self._count(values, event)
        if not self.open:
            self.done.append(value)
            return
        frame = self.open[-1]
        frame.values += values
        if height >= frame.height:
            frame.height = height + 1
        if type(frame.data) is list:
            frame.data.append(value)
        elif not frame.has_key:
            if isinstance(value, dict | list):
                raise self._no("a list or mapping as a key", "use a plain word as the key", event.start_mark)
            frame.has_key, frame.key, frame.plain_key = True, value, plain
            if value in frame.data and not (plain and value == "<<"):
                raise self._no(f"the key {str(value)[:40]!r} is there twice", "keep one of them", event.start_mark)
        else:
            frame.has_key = False
            if frame.plain_key and frame.key == "<<":
                self._merge(frame, value, event)
            else:
                frame.data[frame.key] = value

    def _merge(self, frame: _Open, value: Any, event: Any) -> None:
        others = value if isinstance(value, list) else [value]
        if not all(isinstance(other, dict) for other in others):
            raise self._no("<< needs a mapping", "write <<: *name, where &name marks a mapping", event.start_mark)
        frame.merged += others

    def _scalar(self, event: Any) -> Any:
        text, tag = event.value, event.tag
        if tag is None or tag == "!":
            return text if event.style or tag == "!" else _plain(text)
        if tag == f"{_TAG}str":
            return text
        value = _plain(text)
        if tag == f"{_TAG}float" and type(value) is int:
            return float(value)
        if tag != _TAG + {bool: "bool", int: "int", float: "float", type(None): "null"}.get(type(value), "str"):
            raise self._no(f"the tag {tag[:40]!r} is not allowed here", "leave it out", event.start_mark)
        return value

    def _count(self, values: int, event: Any) -> None:
        self.total += values
        if self.total > self.max_values:
            raise self._no(
                f"more than {self.max_values} values, aliases unfolded",
                "split the file, or write it as JSON",
                event.start_mark,
            )

    def _place(self, mark: Any) -> str:
        return f"{mark.line + 1}:{mark.column + 1}" if mark else ""

    def _no(self, what: str, tip: str, mark: Any) -> InvalidInput:
        return _refusal(self.name, self._place(mark), what, tip)


def _plain(text: str) -> Any:
    """A scalar without quotes, by the rules of YAML 1.2 and no others."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if text[0] in "-+.0123456789":
        if _WHOLE.fullmatch(text):
            return int(text)
        if _REAL.fullmatch(text):
            return float(text)
    return text


def _too_deep(name: str, place: str) -> InvalidInput:
    return _refusal(name, place, f"more than {MAX_DEPTH} levels deep", "a job needs a few levels only")


def _refusal(name: str, place: str, what: str, tip: str) -> InvalidInput:
    where = ":".join(part for part in (name[:200], place) if part)
    if not name and place:
        line, _, column = place.partition(":")
        where = f"line {line}, column {column}" if column else f"line {line}"
    return InvalidInput(f"{where}: {what}" if where else what, hint=tip, problems=((where, f"{what}; {tip}"),))


# ------------------------------------------------------------------------------------------- flow yaml
# Values as YAML on one line (`{job: big, on: [n1, n2]}`), for files that people read. `yamlfile` reads it back.


_PLAIN = re.compile(r"[A-Za-z0-9_./+-](?:[A-Za-z0-9_./+ -]*[A-Za-z0-9_./+-])?")


def flow(value: Any) -> str:
    """`value` (mappings, lists and scalars) on one line; text is quoted only where it must be."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(key)}: {flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str):
        return value if _says_itself(value) else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)


def _says_itself(text: str) -> bool:
    """Whether the bare text is read back as this very text, and not as a number, a list or nothing."""
    if not _PLAIN.fullmatch(text) or text.startswith(("- ", "---")):
        return False
    try:
        return load_yaml(text) == [text]
    except InvalidInput:
        return False


# ------------------------------------------------------------------------------------------- key lines
# In which line of a YAML or JSON text each key stands, by the paths that mistakes are told with (`tasks[0].memory`).


_KeyLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Larger texts are not read a second time.
_LARGEST = 4 * 1024 * 1024
_MOST_KEYS = 100_000


def key_lines(text: str) -> list[dict[str, int]]:
    """For each job of the text, in order: path to line, counted from 1. A list, or a mapping with the one key `jobs`, holds
    several jobs."""
    if len(text) > _LARGEST:
        return []
    out: list[dict[str, int]] = []
    try:
        for document in yaml.compose_all(text, Loader=_KeyLoader):
            if document is not None and not _is_null(document):
                out += [_lines_in(job) for job in _jobs_in(document)]
    except (yaml.YAMLError, RecursionError, ValueError):
        return []
    return out


def _is_null(node: Any) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.value in ("", "~", "null")


def _jobs_in(node: Any) -> list[Any]:
    if isinstance(node, yaml.MappingNode) and [key.value for key, _ in node.value] == ["jobs"]:
        inner = node.value[0][1]
        node = inner if isinstance(inner, yaml.SequenceNode) else node
    return list(node.value) if isinstance(node, yaml.SequenceNode) else [node]


def _lines_in(job: Any) -> dict[str, int]:
    lines = {"": job.start_mark.line + 1}
    seen: set[int] = set()  # what an alias names is looked at once
    left: list[tuple[str, Any]] = [("", job)]
    while left and len(lines) < _MOST_KEYS:
        path, node = left.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner = f"{path}.{key.value}" if path else str(key.value)
                lines.setdefault(inner, key.start_mark.line + 1)
                left.append((inner, value))
        elif isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                inner = f"{path}[{number}]"
                lines.setdefault(inner, value.start_mark.line + 1)
                left.append((inner, value))
    return lines
