"""Kubernetes' quantities, exactly: every form that the API accepts, rounded up to our whole units.

What is larger than any amount here counts as the largest one, as Kubernetes caps what it cannot hold; what is no quantity
is an error, and so is a negative one (the API refuses those for requests and for what nodes offer).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import ROUND_CEILING, Context, Decimal
from functools import lru_cache

from msgspec import Struct

from hodei.kube.api.objects import Container, ContainerStatus, Pod, Quantities, Quantity
from hodei.model.errors import InvalidInput
from hodei.model.resources import CPU, MAX_AMOUNT, MAX_DURATION_MS, MEMORY, SUFFIXES, Resources, scale_of

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


# --------------------------------------------------------------------------------------------- numbers
# Numbers as objects of the cluster give them, within bounds: an object may say anything, and none may stop a
# scheduler.


_WHOLE = re.compile(r"-?[0-9]{1,18}")
_DIGITS = re.compile(r"[0-9]{1,4000}")
MAX_INT32 = 2**31 - 1


def is_integer(text: str) -> bool:
    """Whether it is a whole number, maybe a negative one, that fits in 64 bits."""
    return _WHOLE.fullmatch(text) is not None


def bounded(value: int | None, least: int, most: int, otherwise: int = 0) -> int:
    return otherwise if value is None else max(least, min(most, value))


def seconds_ms(value: int | None, otherwise: int = 0) -> int:
    """Seconds of a field in milliseconds: none below 0, none above a century."""
    return otherwise if value is None else bounded(value, 0, MAX_DURATION_MS // 1000) * 1000


def read_seconds_ms(text: str, where: str) -> int:
    """The same of a text, such as an annotation's; InvalidInput names it by `where`."""
    if not _DIGITS.fullmatch(text):
        raise InvalidInput(f"{where} must be a whole number of seconds, not {text[:40]!r}")
    return seconds_ms(int(text))


def read_count(text: str, where: str, most: int = 1_000_000) -> int:
    if not is_integer(text) or not 0 < int(text) <= most:
        raise InvalidInput(f"{where} must be a whole number from 1 on, not {text[:40]!r}")
    return int(text)


PODS = "pods"
# What a container counts for in scores (never in room) that does not say what it needs.
DEFAULT_REQUESTS: Resources = {CPU: 100, MEMORY: 200 * 2**20}
# Under these names a node's table holds what pods are taken to use that do not say; nobody is ever refused for them.
UNDECLARED = {CPU: "cpu~unsaid", MEMORY: "memory~unsaid"}
_POD_LEVEL = (CPU, MEMORY)


class RequestOptions(Struct, frozen=True):
    """`ignored`: extended resources that somebody else looks after, by name or by domain (`example.com`).
    `stand_ins`: amounts for containers that do not say theirs."""

    ignored: frozenset[str] = frozenset()
    default_requests: Resources = {}


DEFAULT_OPTIONS = RequestOptions()


def requests_of(pod: Pod, request_options: RequestOptions = DEFAULT_OPTIONS) -> Resources:
    """What the pod takes of a node; one that is bound and being resized takes the larger of what it has and what it wants."""
    spec, status = pod.spec, pod.status
    actual = _statuses(pod, status.container_statuses)
    starting = _statuses(pod, status.init_container_statuses)
    infeasible = _resize(pod) == "Infeasible"

    def of(container: Container, known: Mapping[str, ContainerStatus]) -> Resources:
        wanted = _wanted(container.resources.requests, container.resources.limits)
        status = known.get(container.name)
        if status is not None and status.resources is not None:
            allocated = max_of(amounts(status.resources.requests), amounts(status.allocated_resources))
            wanted = allocated if infeasible else max_of(wanted, allocated)
        return {**request_options.default_requests, **wanted}

    total: Resources = {}
    for container in spec.containers:
        total = sum_of(total, of(container, actual))
    sidecars: Resources = {}
    first: Resources = {}
    for container in spec.init_containers:
        own = of(container, starting)
        if container.restart_policy == "Always":
            sidecars = sum_of(sidecars, own)
            first = max_of(first, sidecars)
        else:
            first = max_of(first, sum_of(own, sidecars))
    total = max_of(sum_of(total, sidecars), first)
    if spec.resources is not None:
        whole = _wanted(spec.resources.requests, spec.resources.limits)
        total |= {
            name: quantity for name, quantity in whole.items() if name in _POD_LEVEL or name.startswith("hugepages-")
        }
    total = sum_of(total, amounts(spec.overhead))
    total.pop(PODS, None)
    return {name: quantity for name, quantity in total.items() if not _ignored(name, request_options)} | {PODS: 1}


def sum_of(a: Resources, b: Resources) -> Resources:
    """No more than the largest amount: what many containers ask for together is bounded as one is."""
    return {name: min(a.get(name, 0) + b.get(name, 0), MAX_AMOUNT) for name in (*a, *b)}


def max_of(a: Resources, b: Resources) -> Resources:
    return {name: max(a.get(name, 0), b.get(name, 0)) for name in (*a, *b)}


def resize_is_deferred(pod: Pod) -> bool:
    """It is bound and waits for room to grow in its place: what it holds now is its own already."""
    return _resize(pod) == "Deferred"


def _resize(pod: Pod) -> str:
    pending = pod.condition("PodResizePending")
    return pending.reason if pending is not None else ""


def _wanted(requests: Quantities, limits: Quantities) -> Resources:
    """The API fills in a request from its limit; a pod that has not been there yet gets the same."""
    return amounts({**limits, **requests} if limits else requests)


def _statuses(pod: Pod, given: Iterable[ContainerStatus]) -> dict[str, ContainerStatus]:
    return {status.name: status for status in given} if pod.spec.node_name else {}


def _ignored(name: str, request_options: RequestOptions) -> bool:
    return bool(request_options.ignored) and (
        name in request_options.ignored or name.partition("/")[0] in request_options.ignored
    )
