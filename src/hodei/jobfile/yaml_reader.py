"""Read YAML with the plain scalars of YAML 1.2, and JSON. Every error has its line and a hint.

Built on PyYAML's events, not its objects, so that depth, size and aliases are counted while reading: a malicious file is
refused before its aliases are expanded. Knows nothing about jobs; see `parse`.
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
# Numbers with leading zeros, underscores, colons or a base stay text: YAML versions disagree about them.
# Longer ones than any limit are still numbers, so that errors say that they are out of range.
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,299})")
_FLOAT = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]{0,29})?\.[0-9]{1,30}|(?:0|[1-9][0-9]{0,29})\.?)(?:[eE][-+]?[0-9]{1,4})?")
_TAG = "tag:yaml.org,2002:"
_HINTS = (
    ("mapping values are not allowed", "a ': ' inside a value: put the value in quotes, or check the indentation"),
    ("cannot start any token", "indent with spaces, not tabs; quote values that begin with @, ` or %"),
    ("did not find expected key", "check the indentation of this line and the one before"),
    ("expected '-' indicator", "check the indentation; a list and keys cannot be on one level"),
    ("expected <block end>", "check the indentation; a list and keys cannot be on one level"),
    ("unexpected end of stream", "a quote or bracket is not closed"),
    ("expected ',' or", "a bracket is not closed, or a comma is missing"),
    ("could not find expected ':'", "a ':' is missing after the key"),
)


def check_suffix(name: str) -> None:
    if name.lower().endswith(".toml"):
        raise InvalidInput(f"{name} is TOML, but job files are YAML or JSON", hint="an example: hodei job init")


def load_yaml(
    text: str | bytes, *, name: str = "", max_bytes: int = MAX_BYTES, max_values: int = MAX_VALUES
) -> list[object]:
    """The non-empty documents of a file. InvalidInput has `name`, line, column and a hint."""
    if len(text) > max_bytes:
        limit = f"{max_bytes // 1024} KiB" if max_bytes >= 1024 else f"{max_bytes} bytes"
        raise _yaml_error(name, "", f"larger than {limit}", "split the file")
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise _yaml_error(name, "", f"not UTF-8 (byte {error.start})", "save the file as UTF-8") from None
    text = text.removeprefix("\ufeff")
    if text.lstrip()[:1] in ("{", "["):
        try:
            return [_load_json(text, name)]
        except ValueError:
            pass  # not strict JSON; the YAML reader reports where and why
    return list(_Reader(text, name, max_values).documents())


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


class _Frame:
    """A list or mapping that is being read. `values` and `height` count its content with aliases expanded."""

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
        self.stack: list[_Frame] = []
        self.anchors: dict[str, tuple[Any, int, int] | None] = {}
        self.done: list[object] = []

    def documents(self) -> Iterator[object]:
        for event in self._events():
            kind = type(event)
            if kind is yaml.ScalarEvent:
                value = self._scalar(event)
                if event.anchor is not None:
                    self.anchors[event.anchor] = (value, 1, 0)
                self._add(value, 1, 0, event, event.implicit[0] and not event.style)
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
            hint = next((hint for part, hint in _HINTS if part in problem), "check the line and the one before")
            raise self._error(problem, hint, error.problem_mark or error.context_mark) from None
        except yaml.reader.ReaderError as error:
            line = self.text.count("\n", 0, error.position) + 1
            what = f"the character U+{ord(str(error.character)[0]) if isinstance(error.character, str) else error.character:04X} is not allowed"
            raise _yaml_error(self.name, f"{line}", what, "remove it, or write it as an escape in quotes") from None
        except UnicodeEncodeError:
            raise _yaml_error(self.name, "", "half a surrogate pair, which is not text", "remove it") from None

    def _begin(self, event: Any, data: Any) -> None:
        if event.tag not in (None, "!", f"{_TAG}map" if isinstance(data, dict) else f"{_TAG}seq"):
            raise self._error(f"the tag {event.tag[:40]!r} is not allowed", "leave it out", event.start_mark)
        if len(self.stack) >= MAX_DEPTH:
            raise _too_deep(self.name, self._place(event.start_mark))
        self._count(1, event)
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        self.stack.append(_Frame(data, event.anchor, False))

    def _end(self, event: Any) -> None:
        frame = self.stack.pop()
        for other in frame.merged:
            for key, value in other.items():
                frame.data.setdefault(key, value)
        if frame.anchor is not None:
            self.anchors[frame.anchor] = (frame.data, frame.values, frame.height)
        self._add(frame.data, frame.values, frame.height, event, False, counted=True)

    def _alias(self, event: Any) -> None:
        if event.anchor not in self.anchors:
            raise self._error(
                f"*{event.anchor[:40]} is not defined",
                f"mark its target with &{event.anchor[:40]}",
                event.start_mark,
            )
        target = self.anchors[event.anchor]
        if target is None:
            raise self._error(
                f"*{event.anchor[:40]} refers to itself", "a document cannot contain itself", event.start_mark
            )
        value, values, height = target
        if len(self.stack) + height > MAX_DEPTH:
            raise _too_deep(self.name, self._place(event.start_mark))
        self._add(value, values, height, event, False)

    def _add(self, value: Any, values: int, height: int, event: Any, plain: bool, *, counted: bool = False) -> None:
        """Add a complete value to the list or mapping around it."""
        if not counted:
            self._count(values, event)
        if not self.stack:
            self.done.append(value)
            return
        frame = self.stack[-1]
        frame.values += values
        if height >= frame.height:
            frame.height = height + 1
        if type(frame.data) is list:
            frame.data.append(value)
        elif not frame.has_key:
            if isinstance(value, dict | list):
                raise self._error("a list or mapping as a key", "use a plain word as the key", event.start_mark)
            frame.has_key, frame.key, frame.plain_key = True, value, plain
            if value in frame.data and not (plain and value == "<<"):
                raise self._error(f"the key {str(value)[:40]!r} appears twice", "keep one of them", event.start_mark)
        else:
            frame.has_key = False
            if frame.plain_key and frame.key == "<<":
                self._merge(frame, value, event)
            else:
                frame.data[frame.key] = value

    def _merge(self, frame: _Frame, value: Any, event: Any) -> None:
        others = value if isinstance(value, list) else [value]
        if not all(isinstance(other, dict) for other in others):
            raise self._error("<< needs a mapping", "write <<: *name, where &name marks a mapping", event.start_mark)
        frame.merged += others

    def _scalar(self, event: Any) -> Any:
        text, tag = event.value, event.tag
        if tag is None or tag == "!":
            return text if event.style or tag == "!" else _scalar_value(text)
        if tag == f"{_TAG}str":
            return text
        value = _scalar_value(text)
        if tag == f"{_TAG}float" and type(value) is int:
            return float(value)
        if tag != _TAG + {bool: "bool", int: "int", float: "float", type(None): "null"}.get(type(value), "str"):
            raise self._error(f"the tag {tag[:40]!r} is not allowed here", "leave it out", event.start_mark)
        return value

    def _count(self, values: int, event: Any) -> None:
        self.total += values
        if self.total > self.max_values:
            raise self._error(
                f"more than {self.max_values} values, with aliases expanded",
                "split the file, or write it as JSON",
                event.start_mark,
            )

    def _place(self, mark: Any) -> str:
        return f"{mark.line + 1}:{mark.column + 1}" if mark else ""

    def _error(self, what: str, hint: str, mark: Any) -> InvalidInput:
        return _yaml_error(self.name, self._place(mark), what, hint)


def _scalar_value(text: str) -> Any:
    """A scalar without quotes, by the rules of YAML 1.2."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if text[0] in "-+.0123456789":
        if _INTEGER.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            return float(text)
    return text


def _too_deep(name: str, place: str) -> InvalidInput:
    return _yaml_error(name, place, f"more than {MAX_DEPTH} levels deep", "a job needs only a few levels")


def _yaml_error(name: str, place: str, what: str, hint: str) -> InvalidInput:
    where = ":".join(part for part in (name[:200], place) if part)
    if not name and place:
        line, _, column = place.partition(":")
        where = f"line {line}, column {column}" if column else f"line {line}"
    return InvalidInput(f"{where}: {what}" if where else what, hint=hint, problems=((where, f"{what}; {hint}"),))


_PLAIN = re.compile(r"[A-Za-z0-9_./+-](?:[A-Za-z0-9_./+ -]*[A-Za-z0-9_./+-])?")


def flow(value: Any) -> str:
    """YAML on one line (`{job: big, on: [n1, n2]}`); text is quoted only if necessary."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(key)}: {flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str):
        return value if _is_plain_text(value) else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)


def _is_plain_text(text: str) -> bool:
    """Whether the unquoted text is read back as the same text, not as a number, a list or null."""
    if not _PLAIN.fullmatch(text) or text.startswith(("- ", "---")):
        return False
    try:
        return load_yaml(text) == [text]
    except InvalidInput:
        return False


# Larger texts are not read a second time.
_MAX_KEY_LINES_BYTES = 4 * 1024 * 1024
_MAX_KEYS = 100_000


def key_lines(text: str) -> list[dict[str, int]]:
    """For each job of the text (several in a list, or under the only key `jobs`): path (`tasks[0].memory`) -> line."""
    if len(text) > _MAX_KEY_LINES_BYTES:
        return []
    out: list[dict[str, int]] = []
    try:
        for document in yaml.compose_all(text, Loader=_Loader):
            if document is not None and not _is_null(document):
                out += [node_lines(job) for job in _jobs_in(document)]
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


def node_lines(root: Any) -> dict[str, int]:
    """Path -> line, from 1, of every key and entry of a YAML node."""
    lines = {"": root.start_mark.line + 1}
    seen: set[int] = set()  # a node with aliases is visited once
    left: list[tuple[str, Any]] = [("", root)]
    while left and len(lines) < _MAX_KEYS:
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
