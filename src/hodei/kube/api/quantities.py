"""Kubernetes' quantities, exactly: every form that the API accepts, rounded up to our whole units.

What is larger than any amount here counts as the largest one, as Kubernetes caps what it cannot hold; what is no quantity
is an error, and so is a negative one (the API refuses those for requests and for what nodes offer).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import ROUND_CEILING, Context, Decimal
from functools import lru_cache

from hodei.kube.api.objects import Quantity
from hodei.model.errors import InvalidInput
from hodei.model.quantity import MAX_AMOUNT, SUFFIXES
from hodei.model.resources import Resources, scale_of

_FORM = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:[eE]([+-]?[0-9]+)|([numkMGTPE]|[KMGTPE]i))?")
# Enough digits that nothing is rounded before the end, and a bound on what a text may make us compute.
_EXACT = Context(prec=400)
_LONGEST, _WIDEST = 100, 60


@lru_cache(maxsize=4096)
def amount(value: Quantity, scale: int = 1) -> int:
    """`value` in units of 1/`scale`, rounded up: amount("0.1", 1000) == 100."""
    text = str(value)
    found = _FORM.fullmatch(text) if len(text) <= _LONGEST else None
    if found is None:
        raise InvalidInput(f"{text[:40]!r} is not a quantity", hint="write for example 500m, 2, 1.5, 64Mi or 1e3")
    number = Decimal(found[1])
    if found[2]:
        # Beyond these it is the same to us: nothing at all, or more than there can be.
        number = number.scaleb(max(-_WIDEST, min(_WIDEST, int(found[2]))), context=_EXACT)
    number = _EXACT.multiply(_EXACT.multiply(number, SUFFIXES[found[3] or ""]), Decimal(scale))
    if number < 0:
        raise InvalidInput(f"{text!r} is negative", hint="amounts start at 0")
    return int(min(number, Decimal(MAX_AMOUNT)).to_integral_value(ROUND_CEILING))


def amounts(given: Mapping[str, Quantity]) -> Resources:
    return {name: amount(value, scale_of(name)) for name, value in given.items()}


def readable(given: Mapping[str, Quantity]) -> tuple[Resources, list[str]]:
    """The same, where one that cannot be read counts as none of it; and what is wrong with those."""
    found: Resources = {}
    wrong = []
    for name, value in given.items():
        try:
            found[name] = amount(value, scale_of(name))
        except InvalidInput as error:
            found[name] = 0
            wrong.append(f"{name}: {error.message}")
    return found, wrong
