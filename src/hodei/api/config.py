"""A configuration as it comes over the wire or from a file, with all its mistakes at once; and as it is shown."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from math import isfinite
from typing import Any

import msgspec
import yaml
from msgspec import Struct

from hodei.api.config_aliases import translated, uses_source_names
from hodei.jobfile.check import Problems, convert, refuse
from hodei.jobfile.yaml_reader import MAX_DEPTH, load_yaml
from hodei.model.config import Config, ConfigVersion, ProfileConfig, SchedulingConfig
from hodei.model.errors import InvalidInput

DOCS = "docs/reference/configuration.md"
_SECTIONS = ("server", "scheduling", "nodes", "backends", "health")


class ConfigView(Struct, frozen=True, omit_defaults=True):
    """The configuration in force, or one of the history. `how`: start, reload, set or undo."""

    number: int
    at: str
    by: str
    how: str
    scheduling: SchedulingConfig
    restores: int = 0


class ConfigHistory(Struct, frozen=True):
    """The newest first."""

    configurations: list[ConfigView]


def config_view(configuration: ConfigVersion, at: str) -> ConfigView:
    it = configuration
    return ConfigView(it.number, at, it.by, it.how, it.scheduling, it.restores)


def read_body(body: bytes, content_type: str) -> tuple[dict[str, Any], dict[str, int]]:
    """TOML or JSON as plain values, and for TOML the line of each path; InvalidInput if it is neither."""
    lines: dict[str, int] = {}
    try:
        if "toml" in content_type:
            found, lines = read_toml(body, "the configuration is not TOML")
        else:
            found = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        hint = "send TOML with Content-Type: application/toml, or JSON"
        raise InvalidInput(f"the configuration is not JSON: {error}", hint=hint) from None
    if not isinstance(found, dict):
        raise InvalidInput("a configuration is a table of settings", hint=DOCS)
    return found, lines


def parse_config(
    found: dict[str, Any], lines: Mapping[str, int] | None = None, *, whole: bool = False
) -> tuple[Config, bool]:
    """A whole configuration, or (False) the scheduling section alone as one with nothing else, unless it must be a `whole`
    one; InvalidInput names every mistake with its path, and with its line if `lines` knows it. Other names of settings are
    understood too."""
    whole = whole or any(section in found for section in (*_SECTIONS, "scheduler", "schedulers")) or not found
    given = found if whole else {"scheduling": found}
    lines = {path if whole else f"scheduling.{path}": line for path, line in (lines or {}).items()}
    problems: Problems = []
    origins: dict[str, str] = {}
    _find_endless(given, "", problems)
    if problems:  # no arithmetic with them, and the paths are as they were written
        raise _refused(problems, origins, lines)
    if uses_source_names(given):
        given, problems, origins = translated(given)
    made = convert(given, Config, "", problems)
    if problems:
        raise _refused(problems, origins, lines)
    assert isinstance(made, Config)
    return made, whole


def _refused(problems: Problems, origins: Mapping[str, str], lines: Mapping[str, int]) -> InvalidInput:
    error = refuse([_placed(path, text, origins, lines) for path, text in problems], "the configuration")
    error.hint = DOCS
    return error


def _find_endless(value: Any, at: str, problems: Problems, depth: int = 0) -> None:
    """Numbers that are none: no setting means anything by them."""
    if isinstance(value, float) and not isfinite(value):
        problems.append((at, f"{value} is not a number that can be used here"))
    elif isinstance(value, dict) and depth < MAX_DEPTH:
        for key, inner in value.items():
            _find_endless(inner, f"{at}.{key}" if at else str(key), problems, depth + 1)
    elif isinstance(value, list) and depth < MAX_DEPTH:
        for number, inner in enumerate(value):
            _find_endless(inner, f"{at}[{number}]", problems, depth + 1)


_LAST_PART = re.compile(r"(\.[^.\[]*|\[\d+\])$")


def _placed(path: str, text: str, origins: Mapping[str, str], lines: Mapping[str, int]) -> tuple[str, str]:
    """The problem with the path under which it was written, and its line."""
    for ours in sorted(origins, key=len, reverse=True):
        if path == ours or path.startswith(f"{ours}."):
            path = origins[ours] + path[len(ours) :]
            break
    at = path.replace("'", "")  # quoted where a name has blanks
    line = lines.get(at)
    while line is None and (at := _LAST_PART.sub("", cut := at)) != cut:
        line = lines.get(at)
    return (f"line {line}: {path}" if line else path), text


# ------------------------------------------------------------------------------------------------ files

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]#]+?)\s*\]")
_KEY = re.compile(r"\s*((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=")


def read_toml(text: bytes, name: str) -> tuple[dict[str, Any], dict[str, int]]:
    """A file as plain values, and for each path in it its line (of a table in a line of its own, that line)."""
    try:
        found = tomllib.loads(text.decode("utf-8-sig"))
    except ValueError as error:
        raise InvalidInput(f"{name}: {error}", hint=DOCS) from None
    lines: dict[str, int] = {}
    table, counts = "", dict[str, int]()
    for number, line in enumerate(text.decode("utf-8-sig").splitlines(), 1):
        if header := _HEADER.match(line):
            table = _path(header[2], counts)
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table = f"{table}[{counts[table]}]"
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            lines.setdefault(f"{table}.{_path(key[1], {})}".removeprefix("."), number)
    for path, number in list(lines.items()):  # what has no line of its own begins where the first of its parts does
        while (above := _LAST_PART.sub("", path)) not in (path, ""):
            lines.setdefault(above, number)
            path = above
    return found, lines


def _path(written: str, counts: Mapping[str, int]) -> str:
    """`a . "b"` as `a.b`; the last element of a list of tables that has begun is the one that is meant."""
    out = ""
    for part in re.findall(r"[\w-]+|\"[^\"]*\"|'[^']*'", written):
        if out in counts:
            out = f"{out}[{counts[out]}]"
        out = f"{out}.{part.strip(chr(34) + chr(39))}".removeprefix(".")
    return out


def read_yaml(text: bytes, name: str) -> tuple[dict[str, Any], dict[str, int]]:
    """A file as plain values, and for each path in it its line."""
    found = load_yaml(text, name=name)
    if not found:
        return {}, {}
    if len(found) > 1 or not isinstance(found[0], dict):
        raise InvalidInput(f"{name}: a configuration is one table of settings", hint=DOCS)
    lines: dict[str, int] = {}
    _note_lines(yaml.compose(text.decode("utf-8-sig"), Loader=yaml.SafeLoader), "", lines, 0)
    return found[0], lines


def _note_lines(node: Any, at: str, lines: dict[str, int], depth: int) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = f"{at}.{key.value}" if at else str(key.value)
            lines.setdefault(path, key.start_mark.line + 1)
            if depth < MAX_DEPTH:
                _note_lines(value, path, lines, depth + 1)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            lines.setdefault(f"{at}[{number}]", value.start_mark.line + 1)
            if depth < MAX_DEPTH:
                _note_lines(value, f"{at}[{number}]", lines, depth + 1)


# ------------------------------------------------------------------------------------------------ as TOML


def as_toml(scheduling: SchedulingConfig) -> str:
    """What differs from the defaults, as a file that says the same."""
    lines: list[str] = []
    _section(_besides(msgspec.to_builtins(scheduling), msgspec.to_builtins(SchedulingConfig())), "scheduling", lines)
    return "\n".join(lines) if lines else "[scheduling]"


def _besides(found: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in found.items():
        if key in default and value == default[key]:
            continue
        if value is None:
            continue
        inner = default.get(key)
        if key == "profiles" and isinstance(value, dict):
            plain = msgspec.to_builtins(ProfileConfig())
            value = {name: _besides(profile, plain) for name, profile in value.items()}
        elif isinstance(value, dict) and isinstance(inner, dict) and inner:
            value = _besides(value, inner)
        out[key] = value
    return out


def _section(found: dict[str, Any], at: str, lines: list[str]) -> None:
    """Settings first, then tables, then lists of tables, as TOML wants it."""
    tables = {key: value for key, value in found.items() if isinstance(value, dict) and value}
    plain = {key: value for key, value in found.items() if key not in tables and not _is_tables(value)}
    if plain or not tables:
        lines += ([""] if lines else []) + [f"[{at}]"]
        lines += [f"{_key(key)} = {toml_value(value)}" for key, value in plain.items() if value is not None]
    for key, value in tables.items():
        _section(value, f"{at}.{_key(key)}", lines)
    for key, value in found.items():
        if _is_tables(value):
            for each in value:
                lines += ["", f"[[{at}.{_key(key)}]]"]
                lines += [f"{_key(name)} = {toml_value(inner)}" for name, inner in each.items() if inner is not None]


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, dict) for each in value)


def _key(text: str) -> str:
    return text if text and all(c.isascii() and (c.isalnum() or c in "-_") for c in text) else toml_value(text)


def toml_value(value: Any) -> str:
    """A value as TOML writes it in one line."""
    if isinstance(value, dict):
        inner = ", ".join(f"{_key(key)} = {toml_value(each)}" for key, each in value.items() if each is not None)
        return f"{{{inner}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(each) for each in value)}]"
    return msgspec.json.encode(value).decode()
