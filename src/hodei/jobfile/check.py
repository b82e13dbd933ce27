"""The slow path of parsing: walk a document along its types and find every mistake.

It also converts camelCase keys to snake_case (and the reverse inside Kubernetes' blocks), so that msgspec can decode the
result. It descends only where a type leads, so deep or large junk costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import inspect

from hodei.jobfile.values import Problems, did_you_mean, safe_repr
from hodei.model.errors import InvalidInput

MAX_PROBLEMS = 50
_KEY = re.compile(r"[A-Za-z0-9_./-]{1,64}")


class _TooManyProblems(Exception):
    pass


def convert(data: object, form: type, at: str, problems: Problems) -> Any:
    """`data` as a `form`; mistakes are added to `problems`, up to MAX_PROBLEMS. None if it cannot be converted."""
    try:
        checked = _walk(data, _type_of(form), at.rstrip("."), problems)
    except _TooManyProblems:
        checked = None
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
    choices = [choice for choice in _choices(kind) if _matches(data, choice)]
    if not choices:
        return _wrong(problems, at, _expected(data, kind))
    choice = choices[0]
    if isinstance(choice, inspect.StructType):
        structs = [one for one in choices if isinstance(one, inspect.StructType)]
        return _walk_struct(data, structs, at, problems)
    if isinstance(choice, inspect.ListType | inspect.VarTupleType):
        _check_length(len(data), choice, "entries", at, problems)
        limit = choice.max_length or len(data)
        return [_walk(item, choice.item_type, f"{at}[{i}]", problems) for i, item in enumerate(data[:limit])]
    if isinstance(choice, inspect.DictType):
        return _walk_dict(data, choice, at, problems)
    if isinstance(choice, inspect.StrType):
        _check_length(len(data), choice, "characters", at, problems)
    elif isinstance(choice, inspect.IntType | inspect.FloatType):
        _check_range(data, choice, at, problems)
        return int(data) if isinstance(choice, inspect.IntType) else data
    return data


def _walk_struct(data: Mapping[Any, Any], structs: list[inspect.StructType], at: str, problems: Problems) -> Any:
    struct, out = structs[0], {}
    if struct.tag_field is not None:
        tag = data.get(struct.tag_field)
        tagged = {str(one.tag): one for one in structs}
        if not isinstance(tag, str) or tag not in tagged:
            known = ", ".join(tagged)
            got = "missing key" if tag is None else f"{safe_repr(tag)} is not a type"
            guess = did_you_mean(tag, tagged) if isinstance(tag, str) else ""
            return _wrong(problems, _join(at, struct.tag_field), f"{got}; one of {known}{guess}")
        struct = tagged[tag]
        out[struct.tag_field] = tag
    known_keys = _spellings(struct.cls)
    fields = {field.encode_name: field for field in struct.fields}
    for key, value in data.items():
        if key == struct.tag_field:
            continue
        name = known_keys.get(key) if isinstance(key, str) else None
        if name is None:
            guess = did_you_mean(key, fields) if isinstance(key, str) else ""
            path = _join(at, key) if isinstance(key, str) else at
            _wrong(problems, path, f"unknown key {safe_repr(key)}{guess}")
        elif name in out:
            _wrong(problems, _join(at, key), f"given twice, in two spellings; keep {name!r}")
        else:
            out[name] = _walk(value, fields[name].type, _join(at, key), problems)
    for name, field in fields.items():
        if field.required and name not in out:
            _wrong(problems, _join(at, name), "missing key")
    return out


def _walk_dict(data: Mapping[Any, Any], kind: inspect.DictType, at: str, problems: Problems) -> Any:
    _check_length(len(data), kind, "entries", at, problems)
    out = {}
    for key, value in list(data.items())[: kind.max_length]:
        if not isinstance(key, str):
            _wrong(problems, at, f"the key {safe_repr(key)} is not a string; put it in quotes")
        else:
            _walk(key, kind.key_type, at, problems)
            out[key] = _walk(value, kind.value_type, _join(at, key), problems)
    return out


def _choices(kind: inspect.Type) -> list[inspect.Type]:
    """The members of a union, without metadata."""
    if isinstance(kind, inspect.Metadata):
        return _choices(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [choice for part in kind.types for choice in _choices(part)]
    return [kind]


def _matches(data: object, kind: inspect.Type) -> bool:
    match kind:
        case inspect.NoneType():
            return data is None
        case inspect.BoolType():
            return isinstance(data, bool)
        case inspect.LiteralType():
            return isinstance(data, str) and data in kind.values
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
    return False


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


def _check_length(length: int, kind: Any, unit: str, at: str, problems: Problems) -> None:
    if kind.max_length is not None and length > kind.max_length:
        _wrong(problems, at, f"too long: {length} {unit}, at most {kind.max_length}")
    elif kind.min_length is not None and length < kind.min_length:
        _wrong(problems, at, "empty; give at least one" if unit == "entries" else "empty")


def _check_range(data: int | float, kind: inspect.IntType | inspect.FloatType, at: str, problems: Problems) -> None:
    low = kind.ge if kind.ge is not None else data
    high = kind.le if kind.le is not None else data
    if not low <= data <= high:
        _wrong(problems, at, f"out of range: from {low:g} to {high:g}" if abs(high) < 2**53 else "out of range")


def _wrong(problems: Problems, at: str, text: str) -> None:
    problems.append((at, text))
    if len(problems) >= MAX_PROBLEMS:
        raise _TooManyProblems


def _join(at: str, key: str) -> str:
    key = key if _KEY.fullmatch(key) else safe_repr(key)
    return f"{at}.{key}" if at else key


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", lambda found: "_" + found[1].lower(), name)


def _camel(name: str) -> str:
    return re.sub(r"_([a-z0-9])", lambda found: found[1].upper(), name)


def _printable(text: str) -> str:
    text = text if len(text) <= 500 else f"{text[:500]}..."
    return text if text.isprintable() else repr(text)[1:-1]
