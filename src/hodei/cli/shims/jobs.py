"""What the commands share: option parsing, the selection of jobs, a job as a row in Slurm's terms, and columns."""

from __future__ import annotations

import getopt
import getpass
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, TypeVar

from hodei.backends.slurm_variables import folded_hosts
from hodei.cli import times
from hodei.cli.output import clean
from hodei.cli.times import ms_of
from hodei.model.array import parse_indices
from hodei.model.errors import InvalidInput, NotFound
from hodei.model.resources import CPU, GPU, MEMORY

if TYPE_CHECKING:
    from hodei.api.views import JobView
    from hodei.client import Client
    from hodei.model.job import JobSpec

# Exit code of sbatch and srun for a wrong option; all other errors exit with 1.
BAD_OPTION = 255


class CommandError(Exception):
    """The text that follows the command's name on stderr, and the exit code."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


class Arguments:
    """Options by their long names, the last one of each, and the other arguments."""

    def __init__(self, options: Mapping[str, str], rest: Sequence[str]) -> None:
        self._options, self.rest = dict(options), list(rest)

    def __contains__(self, name: str) -> bool:
        return name in self._options

    def get(self, name: str, default: str = "") -> str:
        return self._options.get(name, default)

    def values(self, name: str) -> list[str]:
        """`a,b,c`"""
        return [part for part in self.get(name).split(",") if part]


def parse_options(argv: Sequence[str], known: str, *, rest: bool = True) -> Arguments:
    """As Slurm does: joined letters, abbreviated long names, values after `=`. `known`: `h/noheader u/user= me`, letter and
    name, with `=` if there is a value. `rest`: other arguments are allowed."""
    letters, names, by_letter = "", [], {}
    for option in known.split():
        letter, slash, name = option.partition("/") if "/" in option else ("", "", option)
        names.append(name)
        if slash:
            by_letter[f"-{letter}"] = name.rstrip("=")
            letters += letter + (":" if name.endswith("=") else "")
    try:
        found, others = getopt.gnu_getopt(list(argv), letters, names)
    except getopt.GetoptError as error:
        if "argument" in error.msg:
            raise CommandError(error.msg) from None
        option = f"-{error.opt}" if len(error.opt) == 1 else f"--{error.opt}"
        raise CommandError(f"unrecognized option '{option}'\nsupported options: docs/how-to/slurm.md") from None
    if others and not rest:
        raise CommandError(f"error: Unrecognized option: {others[0]}")
    return Arguments({by_letter.get(name, name.lstrip("-")): value for name, value in found}, others)


USER, PARTITION = "slurm.hodei.io/user", "slurm.hodei.io/partition"
STATES = {
    "PENDING": "PD", "CONFIGURING": "CF", "RUNNING": "R", "SUSPENDED": "S", "COMPLETED": "CD", "FAILED": "F",
    "TIMEOUT": "TO", "CANCELLED": "CA", "NODE_FAIL": "NF", "OUT_OF_MEMORY": "OOM", "PREEMPTED": "PR",
    "COMPLETING": "CG", "BOOT_FAIL": "BF", "DEADLINE": "DL", "REQUEUED": "RQ",
}  # fmt: skip
LIVE = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING")
_SLURM_STATES = {
    "pending": "PENDING", "held": "PENDING", "scheduled": "CONFIGURING", "running": "RUNNING", "suspended": "SUSPENDED",
    "succeeded": "COMPLETED", "failed": "FAILED", "cancelled": "CANCELLED",
}  # fmt: skip
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


class JobRow:
    """A job with Slurm's terms for its fields. Its specification is fetched only if a column needs it."""

    def __init__(self, view: JobView, client: Client | None = None) -> None:
        self.view, self.client = view, client

    @cached_property
    def spec(self) -> JobSpec:
        from hodei.jobfile.parse import parse_job

        assert self.client is not None
        return parse_job(self.client.job(self.view.id).spec)

    @property
    def job(self) -> str:
        """`17`, or `17_5` for an array element."""
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

    @property
    def state(self) -> str:
        view = self.view
        if view.state == "held" and view.reason_code == "SUSPENDED":
            return "SUSPENDED"
        if view.state == "failed":
            return _FAILED.get(view.reason_code, "FAILED")
        if view.state == "running" and view.cancel_requested:
            return "COMPLETING"
        return _SLURM_STATES.get(view.state, view.state.upper())

    @property
    def short_state(self) -> str:
        return STATES.get(self.state, self.state[:2])

    @property
    def pending(self) -> bool:
        return self.state == "PENDING"

    @property
    def reason(self) -> str:
        code = "HELD" if self.view.state == "held" else self.view.reason_code
        if self.view.state in ("running", "scheduled", "succeeded"):
            return "None"
        return next((reason for pattern, reason in _REASONS if re.fullmatch(pattern, code)), code)

    @property
    def nodes(self) -> str:
        return folded_hosts(self.view.nodes)

    @property
    def nodes_or_reason(self) -> str:
        return f"({self.reason})" if self.pending else self.nodes

    @property
    def exit_code(self) -> str:
        """`3:0`, or `0:9` for signal 9."""
        code = self.view.exit_code
        if self.state in ("TIMEOUT", "CANCELLED") or code is None:
            return "0:15" if self.state == "CANCELLED" and self.view.started_at else "0:0"
        return f"0:{code - 128}" if code > 128 else f"{code}:0"

    @property
    def elapsed_s(self) -> int:
        if not self.view.started_at:
            return 0
        return max(0, (ms_of(self.view.finished_at) or times.now_ms()) - ms_of(self.view.started_at)) // 1000

    @property
    def limit_s(self) -> int:
        return self.spec.timeout_ms // 1000

    def limit(self, format: Callable[[int], str], elapsed_s: int = 0) -> str:
        """The time limit in whole minutes, or what is left of it after `elapsed_s`."""
        return format(max(0, -(-self.limit_s // 60) * 60 - elapsed_s)) if self.limit_s else "UNLIMITED"

    @property
    def start(self) -> str:
        return format_time(self.view.started_at or self.view.start_p50)

    @property
    def end(self) -> str:
        if self.view.finished_at or not self.view.started_at or not self.limit_s:
            return format_time(self.view.finished_at)
        return format_epoch((ms_of(self.view.started_at) // 1000) + self.limit_s)

    def _total(self, resource: str) -> int:
        return sum(task.count * task.request.get(resource, 0) for task in self.spec.tasks)

    @property
    def cpus(self) -> int:
        return max(1, -(-self._total(CPU) // 1000))

    @property
    def memory(self) -> str:
        """Of one node, in Slurm's format: `100M`, `8G`."""
        mib = -(-max(task.request.get(MEMORY, 0) for task in self.spec.tasks) // _MIB)
        return f"{mib // 1024}G" if mib and mib % 1024 == 0 else f"{mib}M"

    @property
    def gpus(self) -> int:
        return -(-self._total(GPU) // 1000)

    @property
    def tasks(self) -> int:
        text = self.spec.tasks[0].env.get("SLURM_NTASKS", "")
        return int(text) if text.isdigit() else self.spec.size

    @property
    def node_count(self) -> int:
        return len(self.view.nodes) or 1


def format_duration(seconds: int) -> str:
    """`0:03`, `10:00`, `1:00:00`, `2-03:00:00`."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}-{hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def format_full_duration(seconds: int) -> str:
    """`00:00:03`, `2-03:00:00`."""
    days, rest = divmod(seconds, 86_400)
    return (f"{days}-" if days else "") + f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"


def format_time(moment: str, none: str = "N/A") -> str:
    """In the time zone of this machine, as in Slurm."""
    return format_epoch(ms_of(moment) // 1000) if moment else none


def format_epoch(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


def midnight() -> str:
    today = time.localtime()
    return datetime(today.tm_year, today.tm_mon, today.tm_mday).astimezone().isoformat(timespec="seconds")


_JOB = re.compile(r"(\d+)(?:_(?:(\d+)|\*|\[([\d,:%-]+)\]))?(?:\.\w+)?")
# States of Hodei that may be a state of Slurm; `failed` for all others.
_API_STATES = {
    "PENDING": ("pending", "held"), "CONFIGURING": ("scheduled",), "RUNNING": ("running",), "SUSPENDED": ("held",),
    "COMPLETING": ("running",), "COMPLETED": ("succeeded",), "CANCELLED": ("cancelled",),
}  # fmt: skip


def job_ids(client: Client, text: str) -> list[int]:
    """The jobs of `17`, `17_5` or `17_[1-3]`. The id of an array means all its elements. NotFound if there is no such job,
    CommandError if it is not an id."""
    found = _JOB.fullmatch(text)
    if found is None:
        raise CommandError(f"error: Invalid job id {text[:80]}")
    view = client.job(int(found[1])).job
    if "_" not in text and (view.array is None or view.array.first != view.id):
        return [view.id]
    if view.array is None:
        raise NotFound(f"job {found[1]} is not an array")
    from hodei.client.job_refs import array_place

    place = array_place(view.array)
    if not found[2] and not found[3]:
        return list(range(place.first, place.last + 1))
    try:
        return [place.job_of(index) for index in parse_indices((found[2] or found[3]).partition("%")[0])]
    except InvalidInput as error:
        raise NotFound(error.message, hint=error.hint) from None


def job_views(client: Client, text: str) -> list[JobView]:
    """As `job_ids`, without array elements that the server has forgotten."""
    ids = job_ids(client, text)
    if len(ids) == 1:
        return [client.job(ids[0]).job]
    selected, oldest = set(ids), min(ids)
    # Newest first, page by page: a few requests for thousands of elements.
    views = takewhile(lambda view: view.id >= oldest, client.jobs(after=max(ids) + 1))
    return [view for view in views if view.id in selected][::-1]


def array_of(client: Client, text: str) -> int:
    """The array of a bare id or of `17_*`; 0 if it is not an array."""
    found = re.fullmatch(r"(\d+)(?:_\*)?", text)
    if found is None:
        return 0
    array = client.job(int(found[1])).job.array
    return array.first if array is not None and (array.first == int(found[1]) or "_" in text) else 0


def selected_states(args: Arguments, default: Iterable[str] = LIVE, option: str = "states") -> set[str]:
    """`PD,running`, `all`."""
    names = [name.upper() for name in args.values(option)]
    if "ALL" in names:
        return set(STATES)
    by_letters = {short: long for long, short in STATES.items()}
    states = {by_letters.get(name, name) for name in names}
    if unknown := states - set(STATES):
        raise CommandError(f"error: Invalid job state specified: {', '.join(sorted(unknown))}")
    return states or set(default)


def select_jobs(client: Client, args: Arguments, states: set[str], since: str = "") -> Iterator[JobRow]:
    """Jobs that match the filters of the command line, newest first."""
    api_states = {api_state for state in states for api_state in _API_STATES.get(state, ("failed",))}
    if states >= set(STATES):
        api_states = set()
    names, accounts, partitions = args.values("name"), args.values("account"), args.values("partition")
    users = [*args.values("user"), *([getpass.getuser()] if "me" in args else [])]
    for view in client.jobs(state=sorted(api_states), since=since):
        row = JobRow(view, client)
        if (
            row.state in states
            and (not users or row.user in users or view.user in users)
            and (not names or view.name in names)
            and (not accounts or view.project in accounts)
            and (not partitions or row.partition in partitions)
        ):
            yield row


T = TypeVar("T")
Fields = Mapping[str, tuple[str, Callable[[T], object]]]
_FIELD = re.compile(r"%(\.)?(\d+)?([A-Za-z])")


def format_rows(format: str, fields: Fields[T], rows: Iterable[T], *, header: bool) -> Iterator[str]:
    """Lines in the format of squeue and sinfo: `%i` as it is, `%18i` cut and padded to 18 characters, `%.18i` right-aligned."""
    for _, _, letter in _FIELD.findall(format):
        if letter not in fields:
            supported = " ".join(f"%{name}" for name in fields)
            raise CommandError(f"error: the field %{letter} is not supported; use {supported}")
    if header:
        yield _FIELD.sub(lambda found: _cell(found, fields[found[3]][0]), format)
    for row in rows:
        yield _FIELD.sub(lambda found: _cell(found, clean(str(fields[found[3]][1](row)))), format)  # noqa: B023


def _cell(found: re.Match[str], text: str) -> str:
    width = int(found[2] or 0)
    if not width:
        return text
    return text[:width].rjust(width) if found[1] else text[:width].ljust(width)
