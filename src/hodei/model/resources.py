"""Amounts of resources by name, as integers in the smallest unit.

`cpu` and `gpu` are in thousandths, `memory` and `ephemeral-storage` in bytes, any other name (`nvidia.com/t4`,
`licence/matlab`) in whole units. A `Resources` is a dict that is never changed after construction.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import ROUND_CEILING, Decimal
from functools import lru_cache

from hodei.model.errors import InvalidInput

# Parse and format Kubernetes quantities (`250m`, `8Gi`, `1e3`), durations (`1h30m`, `90s`, `01:30:00`) and times.


# Far above any machine, and sums over a large cluster still fit into int64.
MAX_AMOUNT = 2**53

SUFFIXES = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12),
    "P": Decimal(10**15), "E": Decimal(10**18),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40),
    "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip
_QUANTITY = re.compile(r"([+-]?(?:\d{1,300}(?:\.\d{0,30})?|\.\d{1,30}))(?:([eE][+-]?\d{1,2})|([numkMGTPE]|[KMGTPE]i))?")
_BINARY = (("Ei", 2**60), ("Pi", 2**50), ("Ti", 2**40), ("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10))

_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)")
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_CLOCK = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d{1,2}):(\d{2})")
MAX_DURATION_MS = 100 * 366 * 86_400_000


@lru_cache(maxsize=4096)
def parse_quantity(value: str | int | float, *, scale: int = 1) -> int:
    """`value` in units of 1/`scale`, rounded up: parse_quantity("250m", scale=1000) == 250."""
    text = str(value).strip()
    match = _QUANTITY.fullmatch(text)
    if match is None:
        hint = "write a number with an optional suffix, for example 500m, 2, 1.5, 64Mi or 8Gi"
        if text.lower() in ("nan", "inf", "-inf", ".nan", ".inf"):
            raise InvalidInput(f"{text!r} is not an amount", hint=hint)
        if re.fullmatch(r"[\d.]+\s*([KMGTPE]i?)?[bB]", text):
            hint = f"leave out the B: {text.rstrip('bB').strip()}"
        raise InvalidInput(f"{text[:40]!r} is not a quantity", hint=hint)
    number = Decimal(match[1] + (match[2] or "")) * SUFFIXES[match[3] or ""] * scale
    if number < 0:
        raise InvalidInput(f"{text[:40]!r} is negative", hint="amounts start at 0")
    if number > MAX_AMOUNT:
        raise InvalidInput(f"{text[:40]!r} is larger than any machine", hint="check the suffix")
    return int(number.to_integral_value(ROUND_CEILING))


def format_quantity(amount: int, *, scale: int = 1) -> str:
    """The shortest exact Kubernetes form of `amount` in units of 1/`scale`."""
    if scale == 1000:
        return f"{amount // 1000}" if amount % 1000 == 0 else f"{amount}m"
    for suffix, size in _BINARY:
        if amount >= size and amount % size == 0:
            return f"{amount // size}{suffix}"
    return str(amount)


def human_quantity(amount: int, *, scale: int = 1) -> str:
    """A short rounded form: `3.5` cores, `7.8Gi`."""
    if scale == 1000:
        return f"{amount / 1000:.3g}" if amount < 1_000_000 else str(round(amount / 1000))
    for suffix, size in _BINARY:
        if amount >= size:
            return f"{amount / size:.3g}{suffix}" if amount < 1000 * size else f"{amount // size}{suffix}"
    return str(amount)


@lru_cache(maxsize=4096)
def parse_duration_ms(value: str | int | float) -> int:
    """Milliseconds of `90`, `90s`, `1h 30m`, `1.5h`, `2d` or Slurm's `[D-][HH:]MM:SS`. A bare number is seconds."""
    text = str(value).strip()
    total: float
    if re.fullmatch(r"\d+(\.\d+)?", text):
        total = float(text) * 1000
    elif match := _CLOCK.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        total = (((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1000
    else:
        parts = _DURATION_PART.findall(text)
        if not parts or _DURATION_PART.sub("", text).strip():
            raise InvalidInput(f"{text[:40]!r} is not a duration", hint="write 90s, 15m, 1h30m, 2d or HH:MM:SS")
        total = sum(float(number) * _UNIT_MS[unit] for number, unit in parts)
    if not total <= MAX_DURATION_MS:
        raise InvalidInput(f"{text[:40]!r} is longer than a century", hint="check the unit")
    return round(total)


def format_duration(ms: int) -> str:
    """`1h30m`, `45s`, `250ms`: exact; `parse_duration_ms` reads it back."""
    if ms == 0:
        return "0s"
    out = []
    for unit in ("d", "h", "m", "s", "ms"):
        count, ms = divmod(ms, _UNIT_MS[unit])
        if count:
            out.append(f"{count}{unit}")
    return "".join(out)


def format_time(ms: int) -> str:
    """`2026-01-31 14:05:30 UTC`; seconds only if not 0."""
    days, rest = divmod(ms // 1000, 86_400)
    hour, minute, second = rest // 3600, rest // 60 % 60, rest % 60
    # Integer calendar arithmetic with years that begin in March, so that the leap day comes last.
    days += 719_468
    era, day = divmod(days, 146_097)
    year = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    day -= 365 * year + year // 4 - year // 100
    month = (5 * day + 2) // 153
    day -= (153 * month + 2) // 5 - 1
    month += 3 if month < 10 else -9
    year += era * 400 + (month <= 2)
    clock = f"{hour:02}:{minute:02}" + (f":{second:02}" if second else "")
    return f"{year:04}-{month:02}-{day:02} {clock} UTC"


CPU = "cpu"
MEMORY = "memory"
STORAGE = "ephemeral-storage"
GPU = "gpu"

Resources = dict[str, int]

# The request of a member that states none.
DEFAULT_REQUEST: Resources = {CPU: 1000, MEMORY: 256 * 2**20}

_NAME = re.compile(r"(?:[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_ALIASES = {"storage": STORAGE, "ephemeral_storage": STORAGE, "disk": STORAGE, "mem": MEMORY, "cpus": CPU, "gpus": GPU}


def scale_of(resource: str) -> int:
    """Base units per unit: 1000 for cpu and gpu, else 1."""
    return 1000 if resource in (CPU, GPU) else 1


def parse_resources(amounts: Mapping[str, str | int | float]) -> Resources:
    """Checks names and parses quantities. Zero amounts are kept: an explicit zero request differs from none."""
    out: Resources = {}
    for given, amount in amounts.items():
        name = _ALIASES.get(given, given)
        if not _NAME.fullmatch(name):
            raise InvalidInput(
                f"{given[:80]!r} is not a resource name", hint="use cpu, memory, gpu or a name like example.com/fpga"
            )
        if name in out:
            raise InvalidInput(f"{name} is given twice (also as {given!r})", hint="keep one of them")
        out[name] = parse_quantity(amount, scale=scale_of(name))
    return out


def format_resources(resources: Mapping[str, int]) -> dict[str, str]:
    return {name: format_quantity(amount, scale=scale_of(name)) for name, amount in resources.items()}


def human_amount(resource: str, amount: int) -> str:
    return human_quantity(amount, scale=scale_of(resource))
