"""A job of Hodei as Slurm's commands show one: its state, reason, times, number and places in Slurm's words."""

from __future__ import annotations

import getopt
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from hodei.backends.slurm_variables import folded_hosts
from hodei.cli import times
from hodei.cli.output import clean
from hodei.cli.times import ms_of
from hodei.model.job import JOB_ENDED
from hodei.model.resources import CPU, GPU, MEMORY

if TYPE_CHECKING:
    from hodei.api.views import JobView
    from hodei.client import Client
    from hodei.model.job import JobSpec

USER, PARTITION = "slurm.hodei.io/user", "slurm.hodei.io/partition"
STATES = {
    "PENDING": "PD", "CONFIGURING": "CF", "RUNNING": "R", "SUSPENDED": "S", "COMPLETED": "CD", "FAILED": "F",
    "TIMEOUT": "TO", "CANCELLED": "CA", "NODE_FAIL": "NF", "OUT_OF_MEMORY": "OOM", "PREEMPTED": "PR",
    "COMPLETING": "CG", "BOOT_FAIL": "BF", "DEADLINE": "DL", "REQUEUED": "RQ",
}  # fmt: skip
LIVE = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING")
_PLAIN = {"pending": "PENDING", "held": "PENDING", "scheduled": "CONFIGURING", "running": "RUNNING",
          "suspended": "SUSPENDED", "succeeded": "COMPLETED", "failed": "FAILED", "cancelled": "CANCELLED"}  # fmt: skip
_FAILED = {"TIMEOUT": "TIMEOUT", "OUT_OF_MEMORY": "OUT_OF_MEMORY", "LOST": "NODE_FAIL"}
_REASONS = (
    (r"HELD", "JobHeldUser"),
    (r"WAITING_FOR_DEPENDENCY", "Dependency"),
    (r"DEPENDENCY_\w+", "DependencyNeverSatisfied"),
    (r"ARRAY_LIMIT", "JobArrayTaskLimit"),
    (r"QUOTA|QUOTA_LENT|SOFT_QUOTA", "AssocGrpCpuLimit"),
    (r"BUDGET", "AssocGrpBillingMinutes"),
    (r"RESERVED", "Reservation"),
    (r"START_RESERVED|QUEUED", "Priority"),
    (r"BACKOFF", "BeginTime"),
    (r"NODE_\w+|BACKEND_(UNHEALTHY|DISABLED)|NO_NODES|NOT_REACHED", "ReqNodeNotAvail"),
    (r"SELECTOR_MISMATCH|AFFINITY_MISMATCH|WRONG_\w+|OTHER_BACKEND|UNTOLERATED_TAINT", "BadConstraints"),
    (r"INSUFFICIENT_\w+|GPU_FRAGMENTED|NO_FREE_CORES|NOT_IN_ONE_SOCKET|GANG_TOPOLOGY|SPILL_\w+", "Resources"),
    (r"EXIT_CODE", "NonZeroExitCode"),
    (r"TIMEOUT", "TimeLimit"),
    (r"OUT_OF_MEMORY", "OutOfMemory"),
    (r"LOST", "NodeDown"),
    (r"RUN_ERROR|START_FAILED|BACKEND_REFUSED", "JobLaunchFailure"),
    (r"|CANCELLED|SUCCEEDED|RUNNING|PLACED", "None"),
)
_MIB = 1 << 20


class Row:
    """`client` is asked for the job's specification only when a column needs it."""

    def __init__(self, view: JobView, client: Client | None = None) -> None:
        self.view, self._client = view, client

    @cached_property
    def spec(self) -> JobSpec:
        from hodei.jobfile.parse import parse_job

        assert self._client is not None
        return parse_job(self._client.job(self.view.id).spec)

    # ------------------------------------------------------------------------------------- its names

    @property
    def job(self) -> str:
        """`17`, or `17_5` of an element."""
        array = self.view.array
        return str(self.view.id) if array is None else f"{array.first}_{array.index}"

    @property
    def array_job(self) -> str:
        return str(self.view.id if self.view.array is None else self.view.array.first)

    @property
    def index(self) -> str:
        return "N/A" if self.view.array is None else str(self.view.array.index)

    @property
    def user(self) -> str:
        return self.view.labels.get(USER) or self.view.user or "nobody"

    @property
    def partition(self) -> str:
        return self.view.labels.get(PARTITION) or self.view.profile

    # ------------------------------------------------------------------------------------- how it is

    @property
    def state(self) -> str:
        view = self.view
        if view.state == "held" and view.reason_code == "SUSPENDED":
            return "SUSPENDED"
        if view.state == "failed":
            return _FAILED.get(view.reason_code, "FAILED")
        if view.state == "running" and view.cancel_requested:
            return "COMPLETING"
        return _PLAIN.get(view.state, view.state.upper())

    @property
    def short_state(self) -> str:
        return STATES.get(self.state, self.state[:2])

    @property
    def waits(self) -> bool:
        return self.state == "PENDING"

    @property
    def ended(self) -> bool:
        return self.view.state in JOB_ENDED

    @property
    def reason(self) -> str:
        code = "HELD" if self.view.state == "held" else self.view.reason_code
        if self.view.state in ("running", "scheduled", "succeeded"):
            return "None"
        return next((word for pattern, word in _REASONS if re.fullmatch(pattern, code)), code)

    @property
    def nodes(self) -> str:
        return folded_hosts(self.view.nodes)

    @property
    def nodes_or_reason(self) -> str:
        return f"({self.reason})" if self.waits else self.nodes

    @property
    def exit_code(self) -> str:
        """`3:0`, or `0:9` if a signal ended it."""
        code = self.view.exit_code
        if self.state in ("TIMEOUT", "CANCELLED") or code is None:
            return "0:15" if self.state == "CANCELLED" and self.view.started_at else "0:0"
        return f"0:{code - 128}" if code > 128 else f"{code}:0"

    # ------------------------------------------------------------------------------------- its times

    @property
    def elapsed_s(self) -> int:
        began = ms_of(self.view.started_at)
        return max(0, (ms_of(self.view.finished_at) or times.now_ms()) - began) // 1000 if began else 0

    @property
    def limit_s(self) -> int:
        return self.spec.timeout_ms // 1000

    @property
    def limit(self) -> str:
        return span(-(-self.limit_s // 60) * 60) if self.limit_s else "UNLIMITED"

    @property
    def left(self) -> str:
        return span(max(0, -(-self.limit_s // 60) * 60 - self.elapsed_s)) if self.limit_s else "UNLIMITED"

    @property
    def start(self) -> str:
        return clock(self.view.started_at or self.view.start_p50)

    @property
    def end(self) -> str:
        if self.view.finished_at or not self.view.started_at or not self.limit_s:
            return clock(self.view.finished_at)
        return stamp((ms_of(self.view.started_at) // 1000) + self.limit_s)

    # ------------------------------------------------------------------------------------ its size

    def _total(self, resource: str) -> int:
        return sum(task.count * task.request.get(resource, 0) for task in self.spec.tasks)

    @property
    def cpus(self) -> int:
        return max(1, -(-self._total(CPU) // 1000))

    @property
    def memory(self) -> str:
        """Of one node, as Slurm writes it: `100M`, `8G`."""
        mib = -(-max(task.request.get(MEMORY, 0) for task in self.spec.tasks) // _MIB)
        return f"{mib // 1024}G" if mib and mib % 1024 == 0 else f"{mib}M"

    @property
    def gpus(self) -> int:
        return -(-self._total(GPU) // 1000)

    @property
    def tasks(self) -> int:
        said = self.spec.tasks[0].env.get("SLURM_NTASKS", "")
        return int(said) if said.isdigit() else self.spec.size

    @property
    def node_count(self) -> int:
        return len(self.view.nodes) or 1


def span(seconds: int) -> str:
    """`0:03`, `10:00`, `1:00:00`, `2-03:00:00`."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}-{hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def full_span(seconds: int) -> str:
    """`00:00:03`, `2-03:00:00`."""
    days, rest = divmod(seconds, 86_400)
    return (f"{days}-" if days else "") + f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"


def clock(moment: str, none: str = "N/A") -> str:
    """Slurm's times are those of this machine's zone."""
    return stamp(ms_of(moment) // 1000) if moment else none


def stamp(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


def midnight() -> str:
    today = time.localtime()
    return datetime(today.tm_year, today.tm_mon, today.tm_mday).astimezone().isoformat(timespec="seconds")


# --------------------------------------------------------------------------------------------- columns
# Columns: `%.18i %j` of squeue and sinfo, and tables with fixed widths.


T = TypeVar("T")
Fields = Mapping[str, tuple[str, Callable[[T], object]]]
_FIELD = re.compile(r"%(\.)?(\d+)?([A-Za-z])")


def lines(format: str, fields: Fields[T], rows: Iterable[T], *, header: bool) -> Iterable[str]:
    """Each row by `format`: `%i` as it is, `%18i` cut and filled to 18 letters, `%.18i` to the right."""
    for _, _, letter in _FIELD.findall(format):
        if letter not in fields:
            raise Refused(
                f"error: the field %{letter} is not known here; there is {' '.join('%' + one for one in fields)}"
            )
    if header:
        yield _FIELD.sub(lambda found: _cell(found, fields[found[3]][0]), format)
    yield from (_line(format, fields, row) for row in rows)


def _line(format: str, fields: Fields[T], row: T) -> str:
    return _FIELD.sub(lambda found: _cell(found, clean(str(fields[found[3]][1](row)))), format)


def _cell(found: re.Match[str], text: str) -> str:
    width = int(found[2] or 0)
    if not width:
        return text
    return text[:width].rjust(width) if found[1] else text[:width].ljust(width)


# ----------------------------------------------------------------------------------------------- words
# Options of the command line as Slurm's commands read them: short ones joined, long ones cut short, values behind
# `=`.


class Refused(Exception):
    """What is said behind the command's name, and the exit code."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


class Given:
    """The options that were given by their long names, the last of each, and the other words."""

    def __init__(self, options: Mapping[str, str], rest: Sequence[str]) -> None:
        self._options, self.rest = dict(options), list(rest)

    def __contains__(self, name: str) -> bool:
        return name in self._options

    def get(self, name: str, default: str = "") -> str:
        return self._options.get(name, default)

    def several(self, name: str) -> list[str]:
        """`a,b,c`"""
        return [part for part in self.get(name).split(",") if part]


def read(words: Sequence[str], known: str, code: int = 1) -> Given:
    """`known`: `h/noheader u/user= me`: letter and name, `=` for those with a value."""
    letters, names, by_letter = "", [], {}
    for one in known.split():
        letter, slash, name = one.partition("/") if "/" in one else ("", "", one)
        names.append(name)
        if slash:
            by_letter[f"-{letter}"] = name.rstrip("=")
            letters += letter + (":" if name.endswith("=") else "")
    try:
        found, rest = getopt.gnu_getopt(list(words), letters, names)
    except getopt.GetoptError as error:
        word = f"-{error.opt}" if len(error.opt) == 1 else f"--{error.opt}"
        if "argument" in error.msg:
            raise Refused(f"{error.msg}", code) from None
        raise Refused(f"unrecognized option '{word}'\nit is not known here; see docs/how-to/slurm.md", code) from None
    return Given({by_letter.get(name, name.lstrip("-")): value for name, value in found}, rest)
