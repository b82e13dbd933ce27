"""`scontrol`: `show job`, `show hostnames`, and what is done to jobs: hold, release, requeue, suspend, resume."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from hodei.backends.slurm_variables import hosts
from hodei.cli.output import clean
from hodei.cli.shims.finding import ids_of, jobs_of, rows, whole_array
from hodei.cli.shims.rows import STATES, Given, Refused, Row, clock, full_span, read
from hodei.model.errors import Conflict, NotFound

if TYPE_CHECKING:
    from hodei.client import Client

_VERBS = ("hold", "uhold", "release", "requeue", "suspend", "resume")


def run(words: list[str]) -> int:
    given = read(words, "o/oneliner d/details v/verbose Q/quiet a/all")
    verb, *rest = given.rest or [""]
    if verb == "show" and rest and rest[0].lower() in ("hostnames", "hostname") and len(rest) <= 2:
        return _hostnames(rest[1] if len(rest) == 2 else os.environ.get("SLURM_JOB_NODELIST", ""))
    from hodei.client import Client

    if verb == "show" and rest and rest[0].lower() in ("job", "jobs", "jobid") and len(rest) <= 2:
        with Client() as client:
            return _show(client, rest[1] if len(rest) == 2 else "", "oneliner" in given)
    if verb == "show" and rest and rest[0].lower().startswith(("job=", "jobid=")):
        with Client() as client:
            return _show(client, rest[0].partition("=")[2], "oneliner" in given)
    if verb in _VERBS and rest:
        with Client() as client:
            return max(_do(client, verb, text) for one in rest for text in one.split(","))
    known = "show job [N], show hostnames [LIST], hold N, release N, requeue N, suspend N, resume N"
    raise Refused(f"{' '.join(given.rest)[:80]!r} is not known here; there is {known}; for nodes: hodei nodes")


def _hostnames(text: str) -> int:
    """One name a line. Without a list those of the job that it is called in. It asks no server."""
    if not text:
        raise Refused("error: host list is empty")
    try:
        found = hosts(text)
    except ValueError:
        raise Refused(f"error: Invalid hostlist: {text[:80]}") from None
    sys.stdout.writelines(f"{name}\n" for name in found)
    return 0


def _show(client: Client, text: str, one_line: bool) -> int:
    try:
        found = (
            [Row(view, client) for view in jobs_of(client, text)]
            if text
            else list(rows(client, Given({}, ()), set(STATES)))
        )
    except NotFound:
        sys.stderr.write("slurm_load_jobs error: Invalid job id specified\n")
        return 1
    if not found:
        sys.stdout.write("No jobs in the system\n")
    for row in found:
        lines = [" ".join(f"{name}={clean(str(value))}" for name, value in line) for line in _lines(row)]
        sys.stdout.write(" ".join(lines) + " \n" if one_line else "\n   ".join(lines) + "\n\n")
    return 0


def _lines(row: Row) -> list[list[tuple[str, object]]]:
    view, spec = row.view, row.spec
    task = spec.tasks[0]
    array = [] if view.array is None else [("ArrayJobId", row.array_job), ("ArrayTaskId", row.index)]
    if view.array is not None and view.array.at_most:
        array.append(("ArrayTaskThrottle", str(view.array.at_most)))
    waits_for = ",".join(str(one.job or one.name or one.what) for one in spec.after.of) or "(null)"
    tres = f"cpu={row.cpus},mem={row.memory},node={row.node_count}" + (f",gres/gpu={row.gpus}" if row.gpus else "")
    limit = full_span(-(-row.limit_s // 60) * 60) if row.limit_s else "UNLIMITED"
    return [
        [("JobId", view.id), *array, ("JobName", view.name)],
        [("UserId", row.user), ("GroupId", "(null)"), ("MCS_label", "N/A")],
        [("Priority", view.priority), ("Nice", 0), ("Account", view.project), ("QOS", view.qos or "(null)")],
        [("JobState", row.state), ("Reason", row.reason), ("Dependency", waits_for)],
        [("Requeue", int(spec.restart != "never")), ("Restarts", max(0, view.attempt - 1)), ("BatchFlag", 1), ("Reboot", 0),
         ("ExitCode", row.exit_code)],
        [("RunTime", full_span(row.elapsed_s)), ("TimeLimit", limit), ("TimeMin", "N/A")],
        [("SubmitTime", clock(view.submitted_at)), ("EligibleTime", clock(view.submitted_at))],
        [("StartTime", row.start.replace("N/A", "Unknown")), ("EndTime", row.end.replace("N/A", "Unknown")), ("Deadline", "N/A")],
        [("Partition", row.partition)],
        [("NodeList", row.nodes or "(null)")],
        [("BatchHost", view.nodes[0] if view.nodes else "(null)")],
        [("NumNodes", row.node_count), ("NumCPUs", row.cpus), ("NumTasks", row.tasks),
         ("CPUs/Task", max(1, row.cpus // max(1, row.tasks)))],
        [("TRES", tres)],
        [("Command", "(null)")],
        [("WorkDir", task.workdir or "(null)")],
    ]  # fmt: skip


def _do(client: Client, verb: str, text: str) -> int:
    verb = "hold" if verb == "uhold" else verb
    try:
        array = whole_array(client, text)
        if array and verb in ("hold", "release"):
            (client.hold_array if verb == "hold" else client.release_array)(array)
        else:
            for id in ids_of(client, text):
                getattr(client, verb)(id)
    except (NotFound, Conflict) as error:
        what = "Invalid job id specified" if isinstance(error, NotFound) else error.message
        sys.stderr.write(f"{what} for job {text}\n")
        return 1
    return 0
