"""`squeue`, `sacct` and `sinfo`: jobs and nodes as tables."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from hodei.backends.slurm_variables import folded_hosts, folded_numbers
from hodei.cli import times
from hodei.cli.output import clean
from hodei.cli.shims.jobs import (
    STATES,
    Arguments,
    CommandError,
    Fields,
    JobRow,
    format_duration,
    format_full_duration,
    format_rows,
    format_time,
    job_views,
    midnight,
    parse_options,
    select_jobs,
    selected_states,
)
from hodei.cli.times import ms_of
from hodei.model.errors import NotFound
from hodei.model.node import QUEUE_LABEL_SUFFIX

if TYPE_CHECKING:
    from hodei.client import Client

T = TypeVar("T")


def _print(format: str, fields: Fields[T], rows: Iterable[T], args: Arguments) -> int:
    if "long" in args:
        sys.stdout.write(time.strftime("%a %b %d %H:%M:%S %Y\n"))
    sys.stdout.writelines(f"{line}\n" for line in format_rows(format, fields, rows, header="noheader" not in args))
    return 0


_SQUEUE_FORMAT = "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
_SQUEUE_LONG = "%.18i %.9P %.8j %.8u %.8T %.10M %.9l %.6D %R"
_ORDER = {"PENDING": 0, "RUNNING": 1, "SUSPENDED": 2}


class _PendingElements(JobRow):
    """Pending elements of an array with the same reason, as one row: `17_[3,5-9%2]`."""

    def __init__(self, elements: list[JobRow]) -> None:
        super().__init__(elements[0].view, elements[0].client)
        array = self.view.array
        assert array is not None
        limit = f"%{array.at_most}" if array.at_most else ""
        self._indices = folded_numbers(row.view.array.index for row in elements if row.view.array) + limit

    @property
    def job(self) -> str:
        return f"{self.array_job}_[{self._indices}]"

    @property
    def index(self) -> str:
        return self._indices


SQUEUE_FIELDS: Fields[JobRow] = {
    "i": ("JOBID", lambda row: row.job),
    "A": ("JOBID", lambda row: row.view.id),
    "F": ("ARRAY_JOB_ID", lambda row: row.array_job),
    "K": ("ARRAY_TASK_ID", lambda row: row.index),
    "P": ("PARTITION", lambda row: row.partition),
    "j": ("NAME", lambda row: row.view.name),
    "u": ("USER", lambda row: row.user),
    "a": ("ACCOUNT", lambda row: row.view.project),
    "t": ("ST", lambda row: row.short_state),
    "T": ("STATE", lambda row: row.state),
    "M": ("TIME", lambda row: format_duration(row.elapsed_s)),
    "l": ("TIME_LIMIT", lambda row: row.limit(format_duration)),
    "L": ("TIME_LEFT", lambda row: row.limit(format_duration, row.elapsed_s)),
    "D": ("NODES", lambda row: row.node_count),
    "R": ("NODELIST(REASON)", lambda row: row.nodes_or_reason),
    "N": ("NODELIST", lambda row: row.nodes),
    "r": ("REASON", lambda row: row.reason),
    "C": ("CPUS", lambda row: row.cpus),
    "c": ("MIN_CPUS", lambda row: row.cpus),
    "m": ("MIN_MEMORY", lambda row: row.memory),
    "Q": ("PRIORITY", lambda row: row.view.priority),
    "p": ("PRIORITY", lambda row: row.view.priority),
    "q": ("QOS", lambda row: row.view.qos),
    "S": ("START_TIME", lambda row: row.start),
    "e": ("END_TIME", lambda row: row.end),
    "V": ("SUBMIT_TIME", lambda row: format_time(row.view.submitted_at)),
    "Z": ("WORK_DIR", lambda row: row.spec.tasks[0].workdir),
}
_SQUEUE_NAMES = {
    "jobid": "A", "jobarrayid": "i", "arrayjobid": "F", "arraytaskid": "K", "partition": "P", "name": "j", "username": "u",
    "account": "a", "statecompact": "t", "state": "T", "timeused": "M", "timelimit": "l", "timeleft": "L", "numnodes": "D",
    "nodelist": "N", "reasonlist": "R", "reason": "r", "numcpus": "C", "minmemory": "m", "priority": "Q", "priorityllong": "Q",
    "qos": "q", "starttime": "S", "endtime": "e", "submittime": "V", "workdir": "Z",
}  # fmt: skip


def squeue(argv: list[str]) -> int:
    args = parse_options(
        argv,
        "h/noheader l/long o/format= O/Format= u/user= me j/jobs= t/states= n/name= p/partition= A/account= r/array "
        "a/all v/verbose",
        rest=False,
    )
    from hodei.client import Client

    states = selected_states(args)
    with Client() as client:
        if "jobs" in args:
            found: Iterable[JobRow] = _named_jobs(client, args.values("jobs"), states)
        else:
            found = select_jobs(client, args, states)
        rows = sorted(found, key=lambda row: (_ORDER.get(row.state, 3), -row.view.priority, row.view.id))
        if "array" not in args:
            rows = list(_group_elements(rows))
        format = args.get("format") or (_named_format(args.get("Format")) if "Format" in args else "")
        return _print(format or (_SQUEUE_LONG if "long" in args else _SQUEUE_FORMAT), SQUEUE_FIELDS, rows, args)


def _named_jobs(client: Client, ids: list[str], states: set[str]) -> Iterator[JobRow]:
    known = False
    for id in ids:
        try:
            for view in job_views(client, id):
                known = True
                row = JobRow(view, client)
                if row.state in states:
                    yield row
        except NotFound:
            continue
    if ids and not known:
        raise CommandError("slurm_load_jobs error: Invalid job id specified")


def _group_elements(rows: Iterable[JobRow]) -> Iterator[JobRow]:
    groups: dict[object, list[JobRow]] = {}
    for row in rows:
        array = row.view.array
        key = (array.first, row.reason) if array is not None and row.pending else row.view.id
        groups.setdefault(key, []).append(row)
    for group in groups.values():
        yield _PendingElements(group) if group[0].view.array is not None and group[0].pending else group[0]


def _named_format(text: str) -> str:
    """The format of `--Format=JobID:10,State`."""
    out = ""
    for part in text.split(","):
        name, _, width = part.strip().partition(":")
        letter = _SQUEUE_NAMES.get(name.lower())
        if letter is None or not (width or "20").lstrip(".").isdigit():
            raise CommandError(f"error: Invalid job format specification: {part[:60]}")
        out += f"%{width or '20'}{letter}"
    return out


_SACCT_FORMAT = "JobID,JobName,Partition,Account,AllocCPUS,State,ExitCode"
_SACCT_BRIEF = "JobID,State,ExitCode"
# Title, width, value.
_Column = tuple[str, int, Callable[[JobRow], object]]
_SACCT_FIELDS: dict[str, _Column] = {
    name.lower(): (name, width, value)
    for name, width, value in (
        ("JobID", 12, lambda row: row.job),
        ("JobIDRaw", 12, lambda row: row.view.id),
        ("JobName", 10, lambda row: row.view.name),
        ("Partition", 10, lambda row: row.partition),
        ("Account", 10, lambda row: row.view.project),
        ("AllocCPUS", 10, lambda row: row.cpus if row.view.started_at else 0),
        ("NCPUS", 10, lambda row: row.cpus if row.view.started_at else 0),
        ("ReqCPUS", 8, lambda row: row.cpus),
        ("ReqMem", 10, lambda row: row.memory),
        ("State", 10, lambda row: row.state),
        ("ExitCode", 8, lambda row: row.exit_code),
        ("Elapsed", 10, lambda row: format_full_duration(row.elapsed_s)),
        ("ElapsedRaw", 10, lambda row: row.elapsed_s),
        ("CPUTime", 10, lambda row: format_full_duration(row.elapsed_s * row.cpus)),
        ("CPUTimeRAW", 10, lambda row: row.elapsed_s * row.cpus),
        ("Submit", 19, lambda row: format_time(row.view.submitted_at, "Unknown")),
        ("Start", 19, lambda row: format_time(row.view.started_at, "Unknown")),
        ("End", 19, lambda row: format_time(row.view.finished_at, "Unknown")),
        ("User", 9, lambda row: row.user),
        ("NodeList", 15, lambda row: row.nodes or "None assigned"),
        ("NNodes", 8, lambda row: row.node_count),
        ("NTasks", 8, lambda row: row.tasks),
        ("Timelimit", 10, lambda row: row.limit(format_full_duration)),
        ("Reason", 22, lambda row: row.reason),
        ("Priority", 10, lambda row: row.view.priority),
        ("QOS", 10, lambda row: row.view.qos),
        ("WorkDir", 20, lambda row: row.spec.tasks[0].workdir),
        ("MaxRSS", 10, lambda row: ""),
    )
}


def sacct(argv: list[str]) -> int:
    """One row for each job: Hodei has no accounting of steps."""
    args = parse_options(
        argv,
        "j/jobs= n/noheader p/parsable P/parsable2 X/allocations o/format= u/user= me s/state= S/starttime= E/endtime= a/allusers "
        "b/brief A/account= name= delimiter= r/partition= e/helpformat D/duplicates",
    )
    if args.rest:
        raise CommandError(f"error: Unknown arguments: {' '.join(args.rest)}")
    if "helpformat" in args:
        sys.stdout.write(" ".join(title for title, _, _ in _SACCT_FIELDS.values()) + "\n")
        return 0
    columns = _sacct_columns(args.get("format") or (_SACCT_BRIEF if "brief" in args else _SACCT_FORMAT))
    from hodei.client import Client

    with Client() as client:
        states = selected_states(args, STATES, option="state")
        if "jobs" in args:
            rows = []
            for id in args.values("jobs"):
                try:
                    rows += [JobRow(view, client) for view in job_views(client, id)]
                except NotFound:
                    continue
            rows = [row for row in rows if row.state in states]
        else:
            since, until_ms = _since(args.get("starttime")), _time_ms(args.get("endtime") or "now")
            found = select_jobs(client, args, states, since)
            rows = [row for row in found if ms_of(row.view.submitted_at) <= until_ms][::-1]
        _print_sacct(rows, columns, args)
    return 0


def _since(text: str) -> str:
    """`2026-01-31`, `2026-01-31T08:00`, `now-2days`, or today."""
    if text.lower() in ("", "today", "midnight"):
        return midnight()
    if ago := re.fullmatch(r"now-(\d+)(second|minute|hour|day|week)s?", text.lower()):
        unit = {"week": ("d", 7)}.get(ago[2], (ago[2][0], 1))
        return f"{int(ago[1]) * unit[1]}{unit[0]}"
    return datetime.fromtimestamp(_time_ms(text) / 1000, UTC).isoformat(timespec="seconds")


def _time_ms(text: str) -> int:
    """Without a time zone it is that of this machine."""
    if text.lower() == "now":
        return times.now_ms()
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        raise CommandError(f"error: Invalid time specification (pos=0): {text[:60]}") from None


def _sacct_columns(text: str) -> list[_Column]:
    out = []
    for part in text.split(","):
        name, _, width = part.strip().partition("%")
        field = _SACCT_FIELDS.get(name.lower())
        if field is None or not re.fullmatch(r"-?\d*", width):
            raise CommandError(f"error: Invalid field requested: {part[:60]!r}")
        out.append((field[0], int(width) if width.strip("-") else field[1], field[2]))
    return out


def _print_sacct(rows: list[JobRow], columns: list[_Column], args: Arguments) -> None:
    delimiter = args.get("delimiter") or "|"
    parsable = "parsable" in args or "parsable2" in args

    def write(texts: list[str]) -> None:
        if parsable:
            sys.stdout.write(delimiter.join(texts) + (delimiter if "parsable" in args else "") + "\n")
        else:
            cells = (_sacct_cell(text, width) for text, (_, width, _) in zip(texts, columns, strict=True))
            sys.stdout.write("".join(cells) + "\n")

    if "noheader" not in args:
        write([title for title, _, _ in columns])
        if not parsable:
            write(["-" * abs(width) for _, width, _ in columns])
    for row in rows:
        write([clean(str(value(row))) for _, _, value in columns])


def _sacct_cell(text: str, width: int) -> str:
    """Right-aligned, or left-aligned if the width is negative; a `+` marks cut text."""
    size = abs(width)
    cut = text if len(text) <= size else text[: size - 1] + "+"
    return (cut.ljust(size) if width < 0 else cut.rjust(size)) + " "


_SINFO_FORMAT = "%9P %.5a %.10l %.6D %.6t %N"
_SINFO_BY_NODE = "%10N %.6D %.9P %6t"


class _NodeGroup(NamedTuple):
    partition: str
    state: str
    nodes: list[str]
    cpus: str
    memory: str


_SHORT_STATES = {
    "idle": "idle",
    "mixed": "mix",
    "allocated": "alloc",
    "drained": "drain",
    "draining": "drng",
    "down": "down",
}
_SINFO_FIELDS: Fields[_NodeGroup] = {
    "P": ("PARTITION", lambda group: group.partition),
    "R": ("PARTITION", lambda group: group.partition),
    "a": ("AVAIL", lambda group: "up"),
    "l": ("TIMELIMIT", lambda group: "infinite"),
    "D": ("NODES", lambda group: len(group.nodes)),
    "t": ("STATE", lambda group: _SHORT_STATES.get(group.state, group.state)),
    "T": ("STATE", lambda group: group.state),
    "N": ("NODELIST", lambda group: folded_hosts(group.nodes)),
    "n": ("HOSTNAMES", lambda group: ",".join(group.nodes)),
    "c": ("CPUS", lambda group: group.cpus),
    "m": ("MEMORY", lambda group: group.memory),
}


def sinfo(argv: list[str]) -> int:
    """Nodes by partition and state. As in `squeue`, a profile is a partition, except for nodes of a Slurm cluster."""
    known = "h/noheader N/Node l/long o/format= p/partition= n/nodes= t/states= a/all s/summarize v/verbose"
    args = parse_options(argv, known, rest=False)
    from hodei.client import Client

    with Client() as client:
        nodes, profiles = client.nodes(), client.info().profiles
    partitions, names = args.values("partition"), args.values("nodes")
    states = {state.lower() for state in args.values("states")}
    groups: dict[object, _NodeGroup] = {}
    label = f"slurm{QUEUE_LABEL_SUFFIX}"
    pairs = [(part, node) for node in nodes for part in ([node.labels[label]] if label in node.labels else profiles)]
    for partition, node in sorted(pairs, key=lambda pair: (pair[1].name, pair[0])):
        state = _node_state(node.state, node.used, node.capacity)
        if (partitions and partition not in partitions) or (names and node.name not in names):
            continue
        if states and states.isdisjoint((state, _SHORT_STATES.get(state, state))):
            continue
        key = (partition, node.name if "Node" in args else state)
        group = _NodeGroup(partition, state, [], node.capacity.get("cpu", "0"), node.capacity.get("memory", "0"))
        groups.setdefault(key, group).nodes.append(node.name)
    format = args.get("format") or (_SINFO_BY_NODE if "Node" in args else _SINFO_FORMAT)
    return _print(format, _SINFO_FIELDS, groups.values(), args)


def _node_state(state: str, used: dict[str, str], capacity: dict[str, str]) -> str:
    from hodei.model.resources import parse_quantity

    used_milli, total_milli = (parse_quantity(amounts.get("cpu", "0"), scale=1000) for amounts in (used, capacity))
    if state == "cordoned":
        return "draining" if used_milli else "drained"
    if state != "ready":
        return "down"
    return "idle" if not used_milli else "allocated" if used_milli >= total_milli else "mixed"
