"""Read configurations from files and requests, with every mistake at once, and write them as TOML."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from math import isfinite
from typing import Any

import msgspec
import yaml
from msgspec import Struct, structs

from hodei.api.config_aliases import has_aliases, translate
from hodei.jobfile.check import convert, refuse
from hodei.jobfile.values import Problems
from hodei.jobfile.yaml_reader import MAX_DEPTH, load_yaml, node_lines
from hodei.model.config import Config, ConfigVersion, SchedulingConfig
from hodei.model.errors import InvalidInput

DOCS = "docs/reference/configuration.md"
_SECTIONS = ("server", "scheduling", "nodes", "backends", "health")


class ConfigView(Struct, frozen=True, omit_defaults=True):
    """The current configuration, or an earlier one. `how`: start, reload, set or undo."""

    number: int
    at: str
    by: str
    how: str
    scheduling: SchedulingConfig
    restores: int = 0


class ConfigHistory(Struct, frozen=True):
    """Newest first."""

    configurations: list[ConfigView]


def config_view(configuration: ConfigVersion, at: str) -> ConfigView:
    return ConfigView(
        configuration.number, at, configuration.by, configuration.how, configuration.scheduling, configuration.restores
    )


def read_body(body: bytes, content_type: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The values of a TOML or JSON body, and for TOML the line of each path."""
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
    found: dict[str, Any], lines: Mapping[str, int] | None = None, *, full: bool = False
) -> tuple[Config, bool]:
    """A configuration, and whether it is a full one. Without `full`, a table that has none of the sections is read as the
    scheduling section alone. InvalidInput lists every mistake with its path, and its line if `lines` has it.
    Aliases of settings are accepted."""
    full = full or any(section in found for section in (*_SECTIONS, "scheduler", "schedulers")) or not found
    given = found if full else {"scheduling": found}
    lines = {path if full else f"scheduling.{path}": line for path, line in (lines or {}).items()}
    problems: Problems = []
    origins: dict[str, str] = {}
    _find_non_finite(given, "", problems)
    if problems:  # before the translation, which calculates with numbers and changes paths
        raise _refused(problems, origins, lines)
    if has_aliases(given):
        given, problems, origins = translate(given)
    config = convert(given, Config, "", problems)
    if problems:
        raise _refused(problems, origins, lines)
    assert isinstance(config, Config)
    return config, full


def _refused(problems: Problems, origins: Mapping[str, str], lines: Mapping[str, int]) -> InvalidInput:
    error = refuse([_located(path, text, origins, lines) for path, text in problems], "the configuration")
    error.hint = DOCS
    return error


def _find_non_finite(value: Any, at: str, problems: Problems, depth: int = 0) -> None:
    if isinstance(value, float) and not isfinite(value):
        problems.append((at, f"{value} is not a finite number"))
    elif isinstance(value, dict) and depth < MAX_DEPTH:
        for key, inner in value.items():
            _find_non_finite(inner, f"{at}.{key}" if at else str(key), problems, depth + 1)
    elif isinstance(value, list) and depth < MAX_DEPTH:
        for number, inner in enumerate(value):
            _find_non_finite(inner, f"{at}[{number}]", problems, depth + 1)


_LAST_PART = re.compile(r"(\.[^.\[]*|\[\d+\])$")


def _located(path: str, text: str, origins: Mapping[str, str], lines: Mapping[str, int]) -> tuple[str, str]:
    """The problem with its line, and with the path as the user wrote it."""
    for ours in sorted(origins, key=len, reverse=True):
        if path == ours or path.startswith(f"{ours}."):
            path = origins[ours] + path[len(ours) :]
            break
    at = path.replace("'", "")  # a name with blanks is quoted
    line = lines.get(at)
    while line is None and (at := _LAST_PART.sub("", cut := at)) != cut:
        line = lines.get(at)
    return (f"line {line}: {path}" if line else path), text


_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]#]+?)\s*\]")
_KEY = re.compile(r"\s*((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=")


def read_toml(text: bytes, name: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The values of a file, and the line of each path in it."""
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
    for path, number in list(lines.items()):  # a parent without its own line has that of its first child
        while (above := _LAST_PART.sub("", path)) not in (path, ""):
            lines.setdefault(above, number)
            path = above
    return found, lines


def _path(written: str, counts: Mapping[str, int]) -> str:
    """`a . "b"` as `a.b`. An array of tables refers to its latest element."""
    out = ""
    for part in re.findall(r"[\w-]+|\"[^\"]*\"|'[^']*'", written):
        if out in counts:
            out = f"{out}[{counts[out]}]"
        out = f"{out}.{part.strip(chr(34) + chr(39))}".removeprefix(".")
    return out


def read_yaml(text: bytes, name: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The values of a file, and the line of each path in it."""
    found = load_yaml(text, name=name)
    if not found:
        return {}, {}
    if len(found) > 1 or not isinstance(found[0], dict):
        raise InvalidInput(f"{name}: a configuration is one table of settings", hint=DOCS)
    lines = node_lines(yaml.compose(text.decode("utf-8-sig"), Loader=yaml.SafeLoader))
    del lines[""]
    return found[0], lines


def as_toml(scheduling: SchedulingConfig) -> str:
    """The settings that differ from the defaults, as TOML that reads back to the same configuration."""
    lines: list[str] = []
    _section(non_defaults(scheduling), "scheduling", lines)
    return "\n".join(lines) if lines else "[scheduling]"


def non_defaults(value: Any) -> Any:
    """The settings that differ from the defaults, as plain values."""
    if isinstance(value, dict):
        return {key: non_defaults(inner) for key, inner in value.items()}
    if not isinstance(value, Struct):
        return msgspec.to_builtins(value)
    out = {}
    for field in structs.fields(value):
        default = field.default_factory() if callable(field.default_factory) else field.default
        inner = getattr(value, field.name)
        if inner != default:
            out[field.encode_name] = non_defaults(inner)
    return out


def _section(found: dict[str, Any], at: str, lines: list[str]) -> None:
    """Settings first, then tables, then arrays of tables: the order that TOML requires."""
    tables = {key: value for key, value in found.items() if isinstance(value, dict) and value}
    scalars = {key: value for key, value in found.items() if key not in tables and not _is_tables(value)}
    if scalars or not tables:
        lines += ([""] if lines else []) + [f"[{at}]"]
        lines += [f"{_key(key)} = {toml_value(value)}" for key, value in scalars.items() if value is not None]
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
    """A value as inline TOML."""
    if isinstance(value, dict):
        inner = ", ".join(f"{_key(key)} = {toml_value(each)}" for key, each in value.items() if each is not None)
        return f"{{{inner}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(each) for each in value)}]"
    return msgspec.json.encode(value).decode()
