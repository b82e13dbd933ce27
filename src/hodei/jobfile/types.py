"""The kinds of values that job files are made of: words, lines, amounts, label conditions. `forms` builds on them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct


def text(limit: int) -> Meta:
    return Meta(max_length=limit)


def about(description: str, *examples: Any, **schema: Any) -> Meta:
    return Meta(description=description, examples=list(examples) or None, extra_json_schema=schema or None)


Word = Annotated[str, text(63)]
Key = Annotated[str, text(317)]
Line = Annotated[str, text(1024)]
Long = Annotated[str, text(128 * 1024)]
Short = Annotated[str, text(64)]
Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Quantity = Short | Whole | float
Duration = Short | Whole | float
Command = Annotated[
    Annotated[list[Long], Meta(min_length=1, max_length=4096)] | Long,
    about("The program and its arguments; a string is run by `/bin/sh -c`.", ["python3", "train.py"], "echo hello"),
]
Quantities = Annotated[dict[Key, Quantity], Meta(max_length=64)]
Labels = Annotated[dict[Key, Word], Meta(max_length=256)]
Words = Annotated[list[Word], Meta(min_length=1, max_length=64)]


class Form(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What all forms share: unknown keys are mistakes."""


class Expression(Form, frozen=True):
    """One condition of a Kubernetes node selector term."""

    key: Key
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    values: Annotated[list[Annotated[str, text(253)]], Meta(max_length=256)] | None = None


Expressions = Annotated[list[Expression], Meta(max_length=64)]
Weight = Annotated[int, Meta(ge=1, le=100)]
