"""What runs used: CPU time, peak memory, I/O; compared with what they requested."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from hodei.model.resources import CPU, DEFAULT_REQUEST, MEMORY

if TYPE_CHECKING:
    from hodei.model.job import JobSpec, Run

_Count = Annotated[int, Meta(ge=0)]

# A request is called too large if a run of at least this length used less than this share of it.
_LONG_MS = 60_000
_SMALL_SHARE = 0.25
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


class RunUsage(Struct, frozen=True, omit_defaults=True, gc=False):
    """What a run has used since its start; None is unknown. Memory and I/O in bytes; `cpu_ms` is time on all cores."""

    cpu_ms: _Count | None = None
    peak_memory: _Count | None = None
    read_bytes: _Count | None = None
    write_bytes: _Count | None = None

    def merge(self, other: RunUsage | None) -> RunUsage:
        """Of two measurements of one run the larger amounts: none of them ever decreases."""
        if other is None:
            return self
        return RunUsage(*(_larger(getattr(self, name), getattr(other, name)) for name in self.__struct_fields__))


class Efficiency(Struct, frozen=True, omit_defaults=True):
    """What the measured `runs` of a job used of their requests, added up. `cpu_milli`: on average over the run time, in
    thousandths of a core. A request of 0 means none; None means unknown. `hint`: a request was far above its use."""

    runs: int
    cpu_milli: int | None = None
    cpu_request: int = 0
    peak_memory: int | None = None
    memory_request: int = 0
    read_bytes: int | None = None
    write_bytes: int | None = None
    hint: str = ""

    @property
    def text(self) -> str:
        """`used 1.1 of 8 cores (14 %), peak 1.9 of 16 GiB (12 %), read 3.2 GiB, wrote 120 MiB`"""
        parts = []
        if self.cpu_milli is not None:
            parts.append(f"used {cores_text(self.cpu_milli, self.cpu_request)}")
        if self.peak_memory is not None:
            parts.append(f"peak {_of(self.peak_memory, self.memory_request)}")
        if self.read_bytes is not None:
            parts.append(f"read {size_text(self.read_bytes)}")
        if self.write_bytes is not None:
            parts.append(f"wrote {size_text(self.write_bytes)}")
        return ", ".join(parts)


def efficiency(spec: JobSpec, runs: Iterable[Run], now_ms: int) -> Efficiency | None:
    """Of these runs, one for each member; None if none of them was measured."""
    measured = [run for run in runs if run.usage is not None and run.started_ms and spec.has_member(run.member)]
    if not measured:
        return None
    cpu = _added(cpu_milli(run, now_ms) for run in measured)
    requests = [spec.task_of(run.member).request for run in measured]
    used = [run.usage for run in measured if run.usage is not None]
    return Efficiency(
        runs=len(measured),
        cpu_milli=cpu,
        cpu_request=sum(request.get(CPU, 0) for request in requests),
        peak_memory=_added(one.peak_memory for one in used),
        memory_request=sum(request.get(MEMORY, 0) for request in requests),
        read_bytes=_added(one.read_bytes for one in used),
        write_bytes=_added(one.write_bytes for one in used),
        hint=_hint(spec, [run for run in measured if run.finished_ms]),
    )


def cpu_milli(run: Run, now_ms: int) -> int | None:
    """Cores that it used on average, in thousandths."""
    if run.usage is None or run.usage.cpu_ms is None or not run.started_ms:
        return None
    return run.usage.cpu_ms * 1000 // max((run.finished_ms or now_ms) - run.started_ms, 1)


def _hint(spec: JobSpec, ended: list[Run]) -> str:
    """Which requests were far above the use of every run; "" if none, or if the runs were too short to tell."""
    if not ended or any(run.finished_ms - run.started_ms < _LONG_MS for run in ended):
        return ""
    parts = []
    for resource in (CPU, MEMORY):
        pairs = []
        for run in ended:
            memory = run.usage.peak_memory if run.usage is not None else None
            amount = cpu_milli(run, run.finished_ms) if resource == CPU else memory
            pairs.append((amount, spec.task_of(run.member).request.get(resource, 0)))
        if any(amount is None or request <= DEFAULT_REQUEST[resource] for amount, request in pairs):
            continue
        amount, request = max(((amount or 0, request) for amount, request in pairs), key=lambda pair: pair[0] / pair[1])
        if amount < request * _SMALL_SHARE and resource == CPU:
            parts.append(f"{cores_text(amount, request, percent=False)} on average")
        elif amount < request * _SMALL_SHARE:
            parts.append(f"at most {_of(amount, request, percent=False)} of memory")
    if not parts:
        return ""
    who = "it" if len(ended) == 1 else "each of its runs"
    return f"{who} used {' and '.join(parts)}; a smaller request can start sooner"


def cores_text(milli: int, request_milli: int, *, percent: bool = True) -> str:
    """`1.1 of 8 cores (14 %)`, or `1.1 cores` without a request."""
    unit = "core" if (request_milli or milli) == 1000 else "cores"
    if not request_milli:
        return f"{_number(milli / 1000)} {unit}"
    text = f"{_number(milli / 1000)} of {_number(request_milli / 1000)} {unit}"
    return f"{text} ({share_text(milli, request_milli)})" if percent else text


def cores_number(milli: int) -> str:
    """`1.1`"""
    return _number(milli / 1000)


def size_text(amount: int) -> str:
    """`3.2 GiB`"""
    number, unit = _scaled(amount)
    return f"{number} {unit}"


def share_text(amount: int, request: int) -> str:
    """`14 %`"""
    return f"{round(amount * 100 / request)} %"


def _of(amount: int, request: int, *, percent: bool = True) -> str:
    if not request:
        return size_text(amount)
    number, unit = _scaled(amount)
    whole, whole_unit = _scaled(request)
    text = f"{number}{'' if unit == whole_unit else f' {unit}'} of {whole} {whole_unit}"
    return f"{text} ({share_text(amount, request)})" if percent else text


def _scaled(amount: int) -> tuple[str, str]:
    scaled, place = float(amount), 0
    while scaled >= 1000 and place < len(_UNITS) - 1:
        scaled, place = scaled / 1024, place + 1
    return _number(scaled), _UNITS[place]


def _number(value: float) -> str:
    """With one decimal below 10, two below 0.1."""
    if value >= 10:
        return str(round(value))
    return f"{value:.{1 if value >= 0.1 else 2}f}".removesuffix(".0").removesuffix(".00")


def _added(amounts: Iterable[int | None]) -> int | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if known else None


def _larger(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)
