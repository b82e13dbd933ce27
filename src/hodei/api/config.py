"""Read configurations from files and requests, with every mistake at once, and write them as TOML.

`hodei.configuration` adds the checks that need plugins and backends.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from math import isfinite
from sys import float_info
from typing import Any

import msgspec
import yaml
from msgspec import Struct, structs

from hodei.api.config_aliases import has_aliases, translate
from hodei.jobfile.check import convert, new_problems, refuse, short_number
from hodei.jobfile.values import Problems
from hodei.jobfile.yaml_reader import MAX_DEPTH, load_yaml, node_lines
from hodei.model.config import Config, ConfigVersion, SchedulingConfig
from hodei.model.errors import InvalidInput

DOCS = "docs/reference/configuration.md"
_SECTIONS = Config.__struct_fields__


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
    """The values of a TOML, YAML or JSON body, and for TOML and YAML the line of each path."""
    lines: dict[str, int] = {}
    try:
        if "toml" in content_type:
            found, lines = read_toml(body, "the configuration is not TOML")
        elif "yaml" in content_type:
            found, lines = read_yaml(body, "")
        else:
            found = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        hint = "send TOML with Content-Type: application/toml, YAML with application/yaml, or JSON"
        raise InvalidInput(f"the configuration is not JSON: {error}", hint=hint) from None
    if not isinstance(found, dict):
        raise InvalidInput("a configuration is a table of settings", hint=DOCS)
    return found, lines


def parse_config(
    found: dict[str, Any],
    lines: Mapping[str, int] | None = None,
    *,
    full: bool = False,
    check: Callable[[Config], Problems] = lambda config: [],
) -> tuple[Config, bool]:
    """A configuration, and whether it is a full one. Without `full`, a table that has none of the sections is read as the
    scheduling section alone. InvalidInput lists every mistake with its path, and its line if `lines` has it; `check` finds
    those that types do not show. Aliases of settings are accepted."""
    full = full or any(section in found for section in (*_SECTIONS, "scheduler", "schedulers")) or not found
    given = found if full else {"scheduling": found}
    lines = {path if full else f"scheduling.{path}": line for path, line in (lines or {}).items()}
    problems: Problems = []
    origins: dict[str, str] = {}
    given = _without_bad_numbers(given, "", problems)  # the translation calculates with numbers
    if has_aliases(given):
        given, wrong, origins = translate(given)
        problems += wrong
    mistakes: Problems = []
    config = convert(given, Config, "", mistakes)
    if config is not None:
        mistakes += new_problems(check(config), mistakes)
    problems += new_problems([(_written_path(path, origins), text) for path, text in mistakes], problems)
    if problems or config is None:
        problems.sort(key=lambda problem: _line_of(problem[0], lines) or 0)
        error = refuse([_with_line(path, text, lines) for path, text in problems], "the configuration")
        error.hint = DOCS
        raise error
    return config, full


def _without_bad_numbers(value: Any, at: str, problems: Problems, depth: int = 0) -> Any:
    """Numbers that cannot be calculated with are problems, and are left out (in a list replaced by 0)."""
    if isinstance(value, dict) and depth < MAX_DEPTH:
        return {
            key: _without_bad_numbers(inner, f"{at}.{key}" if at else str(key), problems, depth + 1)
            for key, inner in value.items()
            if _is_good_number(inner, f"{at}.{key}" if at else str(key), problems)
        }
    if isinstance(value, list) and depth < MAX_DEPTH:
        return [
            _without_bad_numbers(inner, f"{at}[{number}]", problems, depth + 1)
            if _is_good_number(inner, f"{at}[{number}]", problems)
            else 0
            for number, inner in enumerate(value)
        ]
    return value


def _is_good_number(value: Any, at: str, problems: Problems) -> bool:
    if isinstance(value, float) and not isfinite(value):
        problems.append((at, f"{value} is not a finite number"))
    elif isinstance(value, int) and abs(value) > float_info.max:
        problems.append((at, f"out of range: {short_number(value)}"))
    else:
        return True
    return False


_LAST_PART = re.compile(r"(\.[^.\[]*|\[\d+\])$")


def _written_path(path: str, origins: Mapping[str, str]) -> str:
    """The path as the user wrote it."""
    for ours in sorted(origins, key=len, reverse=True):
        if path == ours or path.startswith(f"{ours}."):
            return origins[ours] + path[len(ours) :]
    return path


def _with_line(path: str, text: str, lines: Mapping[str, int]) -> tuple[str, str]:
    line = _line_of(path, lines)
    return (f"line {line}: {path}" if line else path), text


def _line_of(path: str, lines: Mapping[str, int]) -> int | None:
    """Of the value, or of the nearest table around it."""
    at = path.replace("'", "")  # a name with blanks is quoted
    line = lines.get(at)
    while line is None and (at := _LAST_PART.sub("", cut := at)) != cut:
        line = lines.get(at)
    return line


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
