"""`scancel` and `scontrol`: actions on jobs, and one job in detail."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from hodei.backends.slurm_variables import hosts
from hodei.cli.output import clean
from hodei.cli.shims.jobs import (
    STATES,
    Arguments,
    CommandError,
    JobRow,
    array_of,
    format_full_duration,
    format_time,
    job_ids,
    job_views,
    parse_options,
    select_jobs,
    selected_states,
)
from hodei.model.errors import Conflict, NotFound
from hodei.model.job import JOB_ENDED

if TYPE_CHECKING:
    from hodei.client import Client

_SCANCEL_OPTIONS = "u/user= me n/name= t/state= p/partition= A/account= s/signal= f/full b/batch v/verbose Q/quiet"
_SCANCEL_FILTERS = ("user", "me", "name", "state", "partition", "account")
_ACTIONS = ("hold", "uhold", "release", "requeue", "suspend", "resume")


def scancel(argv: list[str]) -> int:
    args = parse_options(argv, _SCANCEL_OPTIONS)
    filtered = any(name in args for name in _SCANCEL_FILTERS)
    if not args.rest and not filtered:
        raise CommandError("error: No job identification provided")
    if args.get("signal", "TERM").upper().removeprefix("SIG") not in ("TERM", "KILL", "15", "9"):
        raise CommandError(
            "error: only TERM is supported as a signal; next: hodei exec, or `checkpoint` in the job file"
        )
    from hodei.client import ArrayId, Client

    def report(text: str) -> None:
        if "quiet" not in args:
            sys.stderr.write(f"scancel: {text}\n")

    with Client() as client:
        if filtered:
            selected = {
                row.job: row.view.id for row in select_jobs(client, args, selected_states(args, option="state"))
            }
            named = {id for text in args.rest for id in job_ids(client, text)}
            for job, id in selected.items():
                if not named or id in named:
                    if "verbose" in args:
                        report(f"Terminating job {job}")
                    client.cancel(id)
            return 0
        for text in args.rest:
            try:
                if "verbose" in args:
                    report(f"Terminating job {text}")
                if array := array_of(client, text):
                    client.cancel(ArrayId(array))
                    continue
                for view in job_views(client, text):
                    if view.state in JOB_ENDED:
                        raise Conflict("Job/step already completing or completed")
                    client.cancel(view.id)
            except NotFound:
                # Slurm reports it without a failure.
                report(f"error: Kill job error on job id {text}: Invalid job id specified")
            except Conflict:
                if "verbose" in args:
                    report(f"error: Kill job error on job id {text}: Job/step already completing or completed")
    return 0


def scontrol(argv: list[str]) -> int:
    args = parse_options(argv, "o/oneliner d/details v/verbose Q/quiet a/all")
    action, *rest = args.rest or [""]
    if action == "show" and rest and rest[0].lower() in ("hostnames", "hostname") and len(rest) <= 2:
        return _show_hostnames(rest[1] if len(rest) == 2 else os.environ.get("SLURM_JOB_NODELIST", ""))
    from hodei.client import Client

    if action == "show" and rest and rest[0].lower() in ("job", "jobs", "jobid") and len(rest) <= 2:
        with Client() as client:
            return _show_jobs(client, rest[1] if len(rest) == 2 else "", "oneliner" in args)
    if action == "show" and rest and rest[0].lower().startswith(("job=", "jobid=")):
        with Client() as client:
            return _show_jobs(client, rest[0].partition("=")[2], "oneliner" in args)
    if action in _ACTIONS and rest:
        with Client() as client:
            return max(_apply(client, action, text) for each in rest for text in each.split(","))
    supported = "show job [N], show hostnames [LIST], hold N, release N, requeue N, suspend N, resume N"
    raise CommandError(f"{' '.join(args.rest)[:80]!r} is not supported; use {supported}; for nodes: hodei nodes")


def _show_hostnames(text: str) -> int:
    """One name per line. Without a list, those of the job in which it is called. Makes no request."""
    if not text:
        raise CommandError("error: host list is empty")
    try:
        found = hosts(text)
    except ValueError:
        raise CommandError(f"error: Invalid hostlist: {text[:80]}") from None
    sys.stdout.writelines(f"{name}\n" for name in found)
    return 0


def _show_jobs(client: Client, text: str, one_line: bool) -> int:
    try:
        if text:
            rows = [JobRow(view, client) for view in job_views(client, text)]
        else:
            rows = list(select_jobs(client, Arguments({}, ()), set(STATES)))
    except NotFound:
        sys.stderr.write("slurm_load_jobs error: Invalid job id specified\n")
        return 1
    if not rows:
        sys.stdout.write("No jobs in the system\n")
    for row in rows:
        lines = [" ".join(f"{name}={clean(str(value))}" for name, value in line) for line in _job_lines(row)]
        sys.stdout.write(" ".join(lines) + " \n" if one_line else "\n   ".join(lines) + "\n\n")
    return 0


def _job_lines(row: JobRow) -> list[list[tuple[str, object]]]:
    view, spec = row.view, row.spec
    task = spec.tasks[0]
    array = [] if view.array is None else [("ArrayJobId", row.array_job), ("ArrayTaskId", row.index)]
    if view.array is not None and view.array.at_most:
        array.append(("ArrayTaskThrottle", str(view.array.at_most)))
    dependency = ",".join(str(each.job or each.name or each.what) for each in spec.after.of) or "(null)"
    tres = f"cpu={row.cpus},mem={row.memory},node={row.node_count}" + (f",gres/gpu={row.gpus}" if row.gpus else "")
    return [
        [("JobId", view.id), *array, ("JobName", view.name)],
        [("UserId", row.user), ("GroupId", "(null)"), ("MCS_label", "N/A")],
        [("Priority", view.priority), ("Nice", 0), ("Account", view.project), ("QOS", view.qos or "(null)")],
        [("JobState", row.state), ("Reason", row.reason), ("Dependency", dependency)],
        [("Requeue", int(spec.restart != "never")), ("Restarts", max(0, view.attempt - 1)), ("BatchFlag", 1), ("Reboot", 0),
         ("ExitCode", row.exit_code)],
        [("RunTime", format_full_duration(row.elapsed_s)), ("TimeLimit", row.limit(format_full_duration)), ("TimeMin", "N/A")],
        [("SubmitTime", format_time(view.submitted_at)), ("EligibleTime", format_time(view.submitted_at))],
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


def _apply(client: Client, action: str, text: str) -> int:
    from hodei.client import ArrayId

    action = "hold" if action == "uhold" else action
    try:
        array = array_of(client, text)
        if array and action in ("hold", "release"):
            (client.hold if action == "hold" else client.release)(ArrayId(array))
        else:
            for id in job_ids(client, text):
                getattr(client, action)(id)
    except NotFound:
        sys.stderr.write(f"Invalid job id specified for job {text}\n")
        return 1
    except Conflict as error:
        hint = f"; next: {error.hint}" if error.hint else ""
        sys.stderr.write(f"scontrol: error: {error.message}{hint}\n")
        return 1
    return 0
