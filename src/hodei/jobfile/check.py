"""The slow path of parsing: walk a document along its types and find every mistake.

It also converts camelCase keys to snake_case (and the reverse inside Kubernetes' blocks), so that msgspec can decode the
result. Mistaken values are left out or replaced, so that the rest can be checked further. It descends only where a type
leads, so deep or large junk costs nothing.

Besides types and ranges it applies the function `parse` of a type's metadata: `Annotated[str, Meta(extra={"parse": ...})]`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from sys import float_info
from typing import Any

import msgspec
from msgspec import inspect

from hodei.jobfile.values import Problems, did_you_mean, error_text
from hodei.model.errors import InvalidInput
from hodei.model.names import safe_repr

MAX_PROBLEMS = 50
_KEY = re.compile(r"[A-Za-z0-9_./-]{1,64}")


# Whole numbers of types without limits of their own: what stores, JSON readers and clocks can hold.
MAX_INTEGER = 2**63 - 1
_MAX_DEPTH = 32
# A value with a mistake, which has been reported.
_WRONG: Any = object()


class _TooManyProblems(Exception):
    pass


def convert(data: object, form: type, at: str, problems: Problems) -> Any:
    """`data` as a `form`; mistakes are added to `problems`, up to MAX_PROBLEMS. Mistaken values have their default, or any
    valid value if there is none: the result is for finding more mistakes. None if it cannot be converted at all."""
    try:
        checked = _walk(data, _type_of(form), at.rstrip("."), problems)
    except _TooManyProblems:
        return None
    if checked is _WRONG:
        return None
    try:
        return msgspec.convert(checked, form)
    except (msgspec.ValidationError, OverflowError) as error:
        if not problems:
            problems.append((at.rstrip("."), str(error)))
        return None


def refuse(problems: Problems, what: str = "the job") -> InvalidInput:
    """One error for all problems, safe to print."""
    clean = tuple((_printable(path), _printable(text)) for path, text in problems)
    path, text = clean[0]
    first = f"{path}: {text}" if path else text
    message = first if len(clean) == 1 else f"{len(clean)} problems in {what}; the first is {first}"
    return InvalidInput(message, problems=clean)


def new_problems(found: Problems, known: Problems) -> Problems:
    """Without those that a known problem may have caused: at its path, or above or below it."""
    paths = [path for path, _ in known]
    return [
        (path, text)
        for path, text in found
        if not any(is_within(path, other) or is_within(other, path) for other in paths)
    ]


def is_within(path: str, other: str) -> bool:
    """Whether `path` is `other` or below it."""
    return path == other or path.startswith((f"{other}.", f"{other}["))


def spelling_variants(key: str) -> set[str]:
    """The other spellings of a key: `nodeSelector` for `node_selector`, and the reverse."""
    return {_snake(key), _camel(key)} - {key}


@lru_cache(maxsize=64)
def _type_of(form: type) -> inspect.Type:
    return inspect.type_info(form)


@lru_cache(maxsize=256)
def _spellings(form: type) -> dict[str, str]:
    """Every accepted spelling of every key -> the canonical one."""
    struct = _type_of(form)
    assert isinstance(struct, inspect.StructType)
    names = [field.encode_name for field in struct.fields]
    return {spelling: name for name in names for spelling in (name, *spelling_variants(name))}


def _walk(data: Any, kind: inspect.Type, at: str, problems: Problems) -> Any:
    """The value for msgspec, or _WRONG."""
    members = [member for member in _members(kind) if _matches(data, member[0])]
    if not members:
        return _wrong(problems, at, _expected(data, kind))
    choice, parse = members[0]
    if isinstance(choice, inspect.StructType):
        structs = [one for one, _ in members if isinstance(one, inspect.StructType)]
        out = _walk_struct(data, structs, at, problems)
    elif isinstance(choice, inspect.ListType | inspect.VarTupleType):
        out = _walk_list(data, choice, at, problems)
    elif isinstance(choice, inspect.DictType):
        out = _walk_dict(data, choice, at, problems)
    elif isinstance(choice, inspect.StrType):
        out = data if _check_length(len(data), choice, "characters", at, problems) else _WRONG
    elif isinstance(choice, inspect.IntType | inspect.FloatType):
        out = _walk_number(data, choice, at, problems)
    else:
        out = data if not isinstance(choice, inspect.AnyType) or _fits(data, at, problems) else _WRONG
    if out is _WRONG or out is None or parse is None or _parses(out, parse, at, problems):
        return out
    return _WRONG


def _parses(data: Any, parse: Callable[[Any], object], at: str, problems: Problems) -> bool:
    """Whether `parse` accepts the value. It may report problems of parts, with relative paths."""
    try:
        parse(data)
    except InvalidInput as error:
        for path, text in error.problems or (("", error_text(error)),):
            _wrong(problems, join_path(at, path) if path else at, text)
        return False
    return True


def _walk_struct(data: Mapping[Any, Any], structs: list[inspect.StructType], at: str, problems: Problems) -> Any:
    struct, out = structs[0], {}
    if struct.tag_field is not None:
        tag = data.get(struct.tag_field)
        tagged = {str(one.tag): one for one in structs}
        if not isinstance(tag, str) or tag not in tagged:
            known = ", ".join(tagged)
            got = "missing key" if tag is None else f"{safe_repr(tag)} is not a type"
            guess = did_you_mean(tag, tagged) if isinstance(tag, str) else ""
            return _wrong(problems, join_path(at, struct.tag_field), f"{got}; one of {known}{guess}")
        struct = tagged[tag]
        out[struct.tag_field] = tag
    known_keys = _spellings(struct.cls)
    fields = {field.encode_name: field for field in struct.fields}
    given = set[str]()
    for key, value in data.items():
        if key == struct.tag_field:
            continue
        name = known_keys.get(key) if isinstance(key, str) else None
        if name is None:
            guess = did_you_mean(key, fields) if isinstance(key, str) else ""
            path = join_path(at, key) if isinstance(key, str) else at
            _wrong(problems, path, f"unknown key {safe_repr(key)}{guess}")
        elif name in given:
            _wrong(problems, join_path(at, key), f"given twice, in two spellings; keep {name!r}")
        else:
            given.add(name)
            checked = _walk(value, fields[name].type, join_path(at, key), problems)
            if checked is not _WRONG:
                out[name] = checked
    for name, field in fields.items():
        if field.required and name not in out:
            if name not in given:
                _wrong(problems, join_path(at, name), "missing key")
            out[name] = _stand_in(field.type)
    return out


def _walk_list(data: Any, kind: inspect.ListType | inspect.VarTupleType, at: str, problems: Problems) -> Any:
    if not _check_length(len(data), kind, "entries", at, problems) and not data:
        return _WRONG
    items = [_walk(item, kind.item_type, f"{at}[{i}]", problems) for i, item in enumerate(data[: kind.max_length])]
    return [_stand_in(kind.item_type) if item is _WRONG else item for item in items]  # the others keep their place


def _walk_dict(data: Mapping[Any, Any], kind: inspect.DictType, at: str, problems: Problems) -> Any:
    _check_length(len(data), kind, "entries", at, problems)
    out = {}
    for key, value in list(data.items())[: kind.max_length]:
        if not isinstance(key, str):
            _wrong(problems, at, f"the key {safe_repr(key)} is not a string; put it in quotes")
            continue
        valid_key = _walk(key, kind.key_type, at, problems) is not _WRONG
        checked = _walk(value, kind.value_type, join_path(at, key), problems)
        if valid_key and checked is not _WRONG:
            out[key] = checked
    return out


def _walk_number(data: int | float, kind: inspect.IntType | inspect.FloatType, at: str, problems: Problems) -> Any:
    data = int(data) if isinstance(kind, inspect.IntType) else data
    limit = MAX_INTEGER if isinstance(data, int) else float_info.max
    low, high = -limit if kind.ge is None else kind.ge, limit if kind.le is None else kind.le
    if not low <= data <= high:
        return _wrong(
            problems, at, f"out of range: {short_number(data)} is not from {short_number(low)} to {short_number(high)}"
        )
    return data


def _fits(data: Any, at: str, problems: Problems, depth: int = 0) -> bool:
    """Whether all whole numbers in a value of any type are within the limits."""
    if isinstance(data, int) and abs(data) > MAX_INTEGER:
        _wrong(problems, at, f"out of range: {short_number(data)} is not from -{MAX_INTEGER} to {MAX_INTEGER}")
        return False
    inner: list[tuple[str, Any]] = []
    if isinstance(data, Mapping) and depth < _MAX_DEPTH:
        inner = [(join_path(at, str(key)), value) for key, value in data.items()]
    elif isinstance(data, list | tuple) and depth < _MAX_DEPTH:
        inner = [(f"{at}[{number}]", value) for number, value in enumerate(data)]
    results = [_fits(value, path, problems, depth + 1) for path, value in inner]  # all of them are reported
    return all(results)


def short_number(number: float) -> str:
    """For messages."""
    if isinstance(number, int):
        digits = int(number.bit_length() * 0.30103)
        return str(number) if digits < 40 else f"a number of {digits} digits"
    return f"{number:g}"


def _stand_in(kind: inspect.Type) -> Any:
    """A valid value for a required one with a mistake, so that the rest can be checked."""
    choice = next(choice for choice in _choices(kind) if not isinstance(choice, inspect.NoneType))
    match choice:
        case inspect.StructType():
            tag = {} if choice.tag_field is None else {choice.tag_field: choice.tag}
            return tag | {field.encode_name: _stand_in(field.type) for field in choice.fields if field.required}
        case inspect.LiteralType():
            return choice.values[0]
        case inspect.IntType() | inspect.FloatType():
            return choice.ge or 0
        case inspect.ListType() | inspect.VarTupleType():
            return [_stand_in(choice.item_type)] * (choice.min_length or 0)
        case inspect.DictType():
            return {}
        case inspect.BoolType():
            return False
        case inspect.StrType():
            return "x"
    return None


def _choices(kind: inspect.Type) -> list[inspect.Type]:
    """The members of a union, without metadata."""
    return [choice for choice, _ in _members(kind)]


def _members(
    kind: inspect.Type, parse: Callable[[Any], object] | None = None
) -> list[tuple[inspect.Type, Callable[[Any], object] | None]]:
    """The members of a union, each with the function `parse` of its metadata, or of that of the union."""
    if isinstance(kind, inspect.Metadata):
        return _members(kind.type, (kind.extra or {}).get("parse", parse))
    if isinstance(kind, inspect.UnionType):
        return [member for part in kind.types for member in _members(part, parse)]
    return [(kind, parse)]


def _matches(data: object, kind: inspect.Type) -> bool:
    match kind:
        case inspect.NoneType():
            return data is None
        case inspect.BoolType():
            return isinstance(data, bool)
        case inspect.LiteralType():
            return type(data) in (str, int) and data in kind.values
        case inspect.StrType():
            return isinstance(data, str)
        case inspect.IntType():
            return isinstance(data, int | float) and not isinstance(data, bool) and data == data // 1
        case inspect.FloatType():
            return isinstance(data, int | float) and not isinstance(data, bool)
        case inspect.ListType() | inspect.VarTupleType():
            return isinstance(data, list | tuple)
        case inspect.AnyType():
            return True
        case inspect.DictType() | inspect.StructType():
            return isinstance(data, Mapping)
    return True  # other types are for msgspec


def _expected(data: object, kind: inspect.Type) -> str:
    choices = [choice for choice in _choices(kind) if not isinstance(choice, inspect.NoneType)]
    literals = [str(value) for choice in choices if isinstance(choice, inspect.LiteralType) for value in choice.values]
    if literals and isinstance(data, str):
        return f"{safe_repr(data)} is not one of {', '.join(filter(None, literals))}{did_you_mean(data, literals)}"
    names = list(dict.fromkeys(_type_name(choice) for choice in choices))
    if "a number" in names and "a whole number" in names:
        names.remove("a whole number")
    text = f"expected {' or '.join(names)}, got {_kind_of(data)}"
    if names in (["a string"], ["a string", "a whole number"]) and isinstance(data, bool | int | float):
        text += "; put it in quotes"
    return text


def _type_name(kind: inspect.Type) -> str:
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "a whole number"
        case inspect.FloatType():
            return "a number"
        case inspect.LiteralType():
            return f"one of {', '.join(str(value) for value in kind.values if value)}"
        case inspect.ListType() | inspect.VarTupleType():
            items = {_type_name(choice).removeprefix("a ") for choice in _choices(kind.item_type)}
            return "a list of " + " or ".join(f"{item}s" for item in sorted(items, reverse=True))
        case inspect.DictType() | inspect.StructType():
            return "a mapping"
    return "a string"


def _kind_of(data: object) -> str:
    match data:
        case None:
            return "nothing"
        case bool():
            return "true" if data else "false"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list() | tuple():
            return "a list"
        case Mapping():
            return "a mapping"
    return f"a {type(data).__name__}"


def _check_length(length: int, kind: Any, unit: str, at: str, problems: Problems) -> bool:
    if kind.max_length is not None and length > kind.max_length:
        _wrong(problems, at, f"too long: {length} {unit}, at most {kind.max_length}")
    elif kind.min_length is not None and length < kind.min_length:
        _wrong(problems, at, "empty; give at least one" if unit == "entries" else "empty")
    else:
        return True
    return False


def _wrong(problems: Problems, at: str, text: str) -> Any:
    problems.append((at, text))
    if len(problems) >= MAX_PROBLEMS:
        raise _TooManyProblems
    return _WRONG


def join_path(at: str, key: str) -> str:
    """The path of a key in a table."""
    key = key if _KEY.fullmatch(key) else safe_repr(key)
    return f"{at}.{key}" if at else key


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", lambda found: "_" + found[1].lower(), name)


def _camel(name: str) -> str:
    return re.sub(r"_([a-z0-9])", lambda found: found[1].upper(), name)


def _printable(text: str) -> str:
    text = text if len(text) <= 500 else f"{text[:500]}..."
    return text if text.isprintable() else repr(text)[1:-1]
