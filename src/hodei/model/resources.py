"""Amounts of things by name, as whole numbers in the smallest unit of each.

`cpu` and `gpu` are in thousandths, `memory` and `ephemeral-storage` in bytes, any other name (`nvidia.com/t4`,
`licence/matlab`) in whole units. A `Resources` is a plain dict that nobody changes after it was made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hodei.model.errors import InvalidInput
from hodei.model.quantity import format_quantity, human_quantity, parse_quantity

CPU = "cpu"
MEMORY = "memory"
STORAGE = "ephemeral-storage"
GPU = "gpu"

Resources = dict[str, int]

# What a member gets of which the job does not say.
DEFAULT_REQUEST: Resources = {CPU: 1000, MEMORY: 256 * 2**20}

_NAME = re.compile(r"(?:[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_ALIASES = {"storage": STORAGE, "ephemeral_storage": STORAGE, "disk": STORAGE, "mem": MEMORY, "cpus": CPU, "gpus": GPU}


def scale_of(resource: str) -> int:
    """How many smallest units make one: 1000 for cpu and gpu, else 1."""
    return 1000 if resource in (CPU, GPU) else 1


def parse_resources(amounts: Mapping[str, str | int | float]) -> Resources:
    """Names checked, quantities parsed, zero amounts kept (a zero request is a statement too)."""
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
