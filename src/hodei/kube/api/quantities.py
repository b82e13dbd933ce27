"""Kubernetes' quantities: every form that the API accepts, rounded up to whole units, and the resource requests of pods.

Amounts above the maximum count as the maximum, as in Kubernetes. Invalid and negative ones are errors.
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

_QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:[eE]([+-]?[0-9]+)|([numkMGTPE]|[KMGTPE]i))?")
# Enough digits for exact results, and a limit on the work that a text can cause.
_EXACT = Context(prec=400)
_MAX_LENGTH, _MAX_EXPONENT = 100, 60


@lru_cache(maxsize=4096)
def amount(value: Quantity, scale: int = 1) -> int:
    """`value` in units of 1/`scale`, rounded up: amount("0.1", 1000) == 100."""
    text = str(value)
    found = _QUANTITY.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if found is None:
        raise InvalidInput(f"{text[:40]!r} is not a quantity", hint="write for example 500m, 2, 1.5, 64Mi or 1e3")
    number = Decimal(found[1])
    if found[2]:
        # Beyond this an amount is zero or the maximum anyway.
        number = number.scaleb(max(-_MAX_EXPONENT, min(_MAX_EXPONENT, int(found[2]))), context=_EXACT)
    number = _EXACT.multiply(_EXACT.multiply(number, SUFFIXES[found[3] or ""]), Decimal(scale))
    if number < 0:
        raise InvalidInput(f"{text!r} is negative", hint="amounts start at 0")
    return int(min(number, Decimal(MAX_AMOUNT)).to_integral_value(ROUND_CEILING))


def amounts(given: Mapping[str, Quantity]) -> Resources:
    return {name: amount(value, scale_of(name)) for name, value in given.items()}


def readable(given: Mapping[str, Quantity]) -> tuple[Resources, list[str]]:
    """The amounts, with 0 for unreadable ones, and what is wrong with those."""
    found: Resources = {}
    problems = []
    for name, value in given.items():
        try:
            found[name] = amount(value, scale_of(name))
        except InvalidInput as error:
            found[name] = 0
            problems.append(f"{name}: {error.message}")
    return found, problems


# Numbers of objects, limited to a range: an object may contain any value, and none may crash the scheduler.


_INTEGER = re.compile(r"-?[0-9]{1,18}")
_DIGITS = re.compile(r"[0-9]{1,4000}")
MAX_INT32 = 2**31 - 1


def is_integer(text: str) -> bool:
    """Whether it is an integer that fits in 64 bits."""
    return _INTEGER.fullmatch(text) is not None


def bounded(value: int | None, least: int, most: int, default: int = 0) -> int:
    return default if value is None else max(least, min(most, value))


def seconds_ms(value: int | None, default: int = 0) -> int:
    """Seconds as milliseconds, between 0 and a century."""
    return default if value is None else bounded(value, 0, MAX_DURATION_MS // 1000) * 1000


def read_seconds_ms(text: str, where: str) -> int:
    """The same for a text such as an annotation; InvalidInput names `where`."""
    if not _DIGITS.fullmatch(text):
        raise InvalidInput(f"{where} must be a whole number of seconds, not {text[:40]!r}")
    return seconds_ms(int(text))


def read_count(text: str, where: str, most: int = 1_000_000) -> int:
    if not is_integer(text) or not 0 < int(text) <= most:
        raise InvalidInput(f"{where} must be a whole number from 1 on, not {text[:40]!r}")
    return int(text)


PODS = "pods"
# Requests assumed for containers that declare none, in scores only.
DEFAULT_REQUESTS: Resources = {CPU: 100, MEMORY: 200 * 2**20}
# Pseudo-resources for these assumed requests; no pod is refused for them.
UNDECLARED = {CPU: "cpu~unsaid", MEMORY: "memory~unsaid"}
_POD_LEVEL = (CPU, MEMORY)


class RequestOptions(Struct, frozen=True):
    """`ignored`: extended resources, by name or domain. `default_requests`: for containers that declare none."""

    ignored: frozenset[str] = frozenset()
    default_requests: Resources = {}


DEFAULT_OPTIONS = RequestOptions()


def requests_of(pod: Pod, request_options: RequestOptions = DEFAULT_OPTIONS) -> Resources:
    """The resources that a pod takes on a node; one that is being resized takes the larger of its old and new requests."""
    spec, status = pod.spec, pod.status
    actual = _statuses(pod, status.container_statuses)
    starting = _statuses(pod, status.init_container_statuses)
    infeasible = _resize(pod) == "Infeasible"

    def of(container: Container, known: Mapping[str, ContainerStatus]) -> Resources:
        wanted = _requests_or_limits(container.resources.requests, container.resources.limits)
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
        pod_level = _requests_or_limits(spec.resources.requests, spec.resources.limits)
        total |= {
            name: quantity
            for name, quantity in pod_level.items()
            if name in _POD_LEVEL or name.startswith("hugepages-")
        }
    total = sum_of(total, amounts(spec.overhead))
    total.pop(PODS, None)
    return {name: quantity for name, quantity in total.items() if not _ignored(name, request_options)} | {PODS: 1}


def sum_of(a: Resources, b: Resources) -> Resources:
    """Limited to the maximum amount, as single amounts are."""
    return {name: min(a.get(name, 0) + b.get(name, 0), MAX_AMOUNT) for name in (*a, *b)}


def max_of(a: Resources, b: Resources) -> Resources:
    return {name: max(a.get(name, 0), b.get(name, 0)) for name in (*a, *b)}


def _resize(pod: Pod) -> str:
    pending = pod.condition("PodResizePending")
    return pending.reason if pending is not None else ""


def _requests_or_limits(requests: Quantities, limits: Quantities) -> Resources:
    """The API server defaults a request to its limit; so does this, for pods it has not seen."""
    return amounts({**limits, **requests} if limits else requests)


def _statuses(pod: Pod, given: Iterable[ContainerStatus]) -> dict[str, ContainerStatus]:
    return {status.name: status for status in given} if pod.spec.node_name else {}


def _ignored(name: str, request_options: RequestOptions) -> bool:
    return bool(request_options.ignored) and (
        name in request_options.ignored or name.partition("/")[0] in request_options.ignored
    )
