"""Parsing of the output of PBS, recorded from a real OpenPBS 23.06, and its errors."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from hodei.backends.hpc.commands import CommandResult
from hodei.backends.hpc.pbs import (
    PbsCommands,
    job_status,
    parse_cluster,
    parse_exit,
    parse_json,
    parse_size,
    parse_time,
    pbs_name,
    qsub_command,
    write_script,
)
from hodei.backends.hpc.ports import OutcomeUnknown, Submission
from hodei.model.errors import IN_DOUBT, NOT_REACHED, BackendError, BackendRefused

SAMPLES = Path(__file__).parent / "hpc_samples"


def sample(name: str) -> dict:
    text = (SAMPLES / name).read_text()
    return json.loads(text[text.find("{") : text.rfind("}") + 1])


def sample_status(name: str):
    ((number, job),) = sample(name)["Jobs"].items()
    return job_status(number, job)


@pytest.mark.parametrize(
    ("name", "phase", "code", "reason_code"),
    [
        ("qstat-f-json-running.txt", "running", None, ""),
        ("qstat-held.txt", "pending", None, ""),
        ("qstat-suspended.txt", "running", None, ""),
        ("qstat-x-finished.txt", "ended", 3, ""),
        ("qstat-x-deleted.txt", "ended", 138, ""),
        ("qstat-x-deleted2.txt", "ended", 143, "killed"),
        ("qstat-rerun.txt", "running", None, ""),
    ],
)
def test_recorded_jobs_have_a_phase_and_an_exit_code(name, phase, code, reason_code):
    status = sample_status(name)
    assert (status.phase, status.exit_code, status.reason_code) == (phase, code, reason_code)


def test_a_job_that_can_never_run_is_pending_with_the_reason_of_pbs():
    assert sample_status("qstat-toobig.txt").reason.startswith("Can Never Run: Insufficient amount of resource: ncpus")


@pytest.mark.parametrize(
    ("status", "comment", "expected"),
    [
        (0, "Job run and finished", (0, "")),
        (271, "Job run at ... and terminated by root@vm", (143, "killed")),
        (265, "job killed: walltime 65 exceeded limit 60", (137, "timeout")),
        (265, "job killed: mem 600mb exceeded limit 500mb", (137, "oom")),
        (265, "Job run at Mon on (vm:ncpus=1) and exceeded resource mem", (137, "oom")),
        (271, "Job run at Mon on (vm:ncpus=1) and exceeded resource walltime", (143, "timeout")),
        (0, "Job run at Mon on (vm:mem=5mb) and finished", (0, "")),
        (-27, "Job run at Mon on (vm:ncpus=1) and exceeded resource mem", (None, "oom")),
        (-11, "", (None, "lost")),
        (-3, "", (None, "lost")),
        (-99, "", (None, "lost")),
        (None, "", (None, "killed")),
    ],
)
def test_exit_statuses_are_signals_limits_or_actions_of_pbs(status, comment, expected):
    assert parse_exit(status, comment)[:2] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4592kb", 4592 << 10), ("4gb", 4 << 30), ("0b", 0), ("500mb", 500 << 20), ("2w", 16), ("x", 0)],
)
def test_sizes_have_units(text, expected):
    assert parse_size(text) == expected


def test_times_have_the_format_of_ctime():
    assert parse_time("Sun Nov 15 18:42:00 2026") == 1794768120
    assert parse_time("") == parse_time(None) == parse_time("Unknown") == 0


def test_vnodes_that_represent_only_their_host_are_left_out():
    nodes = json.loads((SAMPLES / "pbsnodes-av.json").read_text())["nodes"]
    queues = sample("qstat-Qf.txt")["Queue"]
    cluster = parse_cluster(nodes, queues, "workq")
    assert [node.name for node in cluster.nodes] == ["vm[0]", "vm[1]", "vm[2]"]
    assert cluster.nodes[0].capacity == {"cpu": 4000, "memory": 4 << 30, "gpu": 2000}
    assert [(queue.name, queue.open, queue.default) for queue in cluster.partitions] == [
        ("workq", True, True),
        ("express", True, False),
    ]
    assert cluster.partitions[0].largest == {"cpu": 8000, "memory": 8 << 30, "gpu": 2000}


@pytest.mark.parametrize(("state", "ready", "cordoned"), [("free", True, False), ("job-busy", True, False), ("down", False, False), ("offline", True, True), ("down,offline", False, True)])  # fmt: skip
def test_vnode_states_map_to_ready_and_cordoned(state, ready, cordoned):
    fields = {"Mom": "vm", "state": state, "resources_available": {"ncpus": 4, "mem": "1gb"}}
    (node,) = parse_cluster({"a": fields}, {}).nodes
    assert (node.ready, node.cordoned) == (ready, cordoned)


def test_output_may_have_a_prefix_and_no_jobs():
    raw = (SAMPLES / "qstat-finished-nox.txt").read_bytes()
    found = parse_json("qstat", CommandResult(35, raw[: raw.rfind(b"}") + 1], b""))
    assert found["pbs_server"] == "vm"
    assert "Jobs" not in found


def a_submission(script_file: str = "/out/1.0.1.sh") -> Submission:
    return Submission(
        "hodei:i:hpc:1.0.1", "a name", "#!/bin/bash -p\nexit 3\n", "workq", "/o", "/e", node="vm[0]", cpus=2, minutes=65,
        script_file=script_file, claim="c1",
    )  # fmt: skip


def test_the_first_process_of_a_job_is_its_script():
    command = qsub_command(a_submission(), requeue=False)
    assert "select=1:ncpus=2:mem=0mb:vnode=vm[0]" in command
    assert "walltime=01:05:00" in command
    assert command[-7:] == ("-v", "HODEI_MARK=hodei:i:hpc:1.0.1", "--", "/bin/bash", "-l", "/out/1.0.1.sh", "c1")


def test_the_login_shell_is_replaced_by_the_script(tmp_path):
    submission = a_submission(str(tmp_path / "1.0.1.sh"))
    write_script(submission)
    assert (tmp_path / "1.0.1.sh").stat().st_mode & 0o777 == 0o600
    (tmp_path / ".bash_profile").write_text("exit() { echo wrong; }; export FROM_PROFILE=1; echo profile\n")
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    command = qsub_command(submission, requeue=False)
    done = subprocess.run(command[command.index("--") + 1 :], env=env, capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (3, b"profile\n")
    with pytest.raises(BackendError) as error:
        write_script(a_submission("/no/such/folder/1.0.1.sh"))
    assert error.value.code == NOT_REACHED


@pytest.mark.parametrize(("name", "expected"), [("a name", "a_name"), ("--x", "x"), ("$(id)", "id_"), ("", "hodei")])
def test_names_are_valid_in_pbs(name, expected):
    assert pbs_name(name) == expected


class FakeCommands:
    def __init__(self, done: CommandResult) -> None:
        self.done = done

    async def run(self, argv, **_):
        return self.done


@pytest.mark.parametrize(
    ("code", "stderr", "error", "name"),
    [
        (None, "qsub did not answer within 25 s", OutcomeUnknown, IN_DOUBT),
        (-15, "", OutcomeUnknown, IN_DOUBT),
        (183, "qsub: Protocol error", OutcomeUnknown, IN_DOUBT),
        (104, "qsub: Connection reset by peer", OutcomeUnknown, IN_DOUBT),
        (1, "qsub: Error communicating with vm(127.0.0.1)", OutcomeUnknown, IN_DOUBT),
        (0, "nonsense", OutcomeUnknown, IN_DOUBT),
        (111, "Connection refused qsub: cannot connect to server vm (errno=111)", BackendError, NOT_REACHED),
        (110, "qsub: cannot connect to server vm (errno=110)", BackendError, NOT_REACHED),
        (186, "qsub: No server to connect to", BackendError, NOT_REACHED),
        (198, "qsub: Maximum number of jobs already in queue", BackendError, "BACKEND_ERROR"),
        (173, "qsub: Queue is not enabled", BackendError, "BACKEND_ERROR"),
        (170, "qsub: Unknown queue", BackendRefused, "BACKEND_REFUSED"),
        (187, "qsub: Unknown resource: x", BackendRefused, "BACKEND_REFUSED"),
    ],
)
def test_the_exit_code_of_qsub_decides_whether_the_outcome_is_known(tmp_path, code, stderr, error, name):
    system = PbsCommands(FakeCommands(CommandResult(code, stderr.encode() if code == 0 else b"", stderr.encode())))
    with pytest.raises(error) as raised:
        asyncio.run(system.submit(a_submission(str(tmp_path / "1.0.1.sh"))))
    assert (type(raised.value), raised.value.code) == (error, name)


@pytest.mark.parametrize(
    ("reason_code", "statuses"),
    [
        ("oom", {-26, -27, -31}),
        ("timeout", {-28, -29}),
        ("killed", {-19, -24, -25}),
        ("error", {-1, -2, -9, -10, -13, -17, -21, -23}),
        ("lost", {-3, -4, -5, -6, -7, -8, -11, -12, -14, -15, -16, -18, -20, -22, -30, -32, -33}),
    ],
)
def test_each_exit_status_of_pbs_has_a_reason_code(reason_code, statuses):
    assert {status for status in range(-33, 0) if parse_exit(status, "")[1] == reason_code} == statuses


def a_queue(name: str, **queues):
    defaults = {"queue_type": "Execution", "enabled": "True", "started": "True"}
    nodes = {"a": {"Mom": "vm", "state": "free", "resources_available": {"ncpus": 4, "mem": "1gb"}}}
    cluster = parse_cluster(nodes, {queue: {**defaults, **fields} for queue, fields in queues.items()})
    return next(queue for queue in cluster.partitions if queue.name == name)


def test_a_routing_queue_has_the_longest_time_limit_of_its_destinations():
    hour, day = {"resources_max": {"walltime": "01:00:00"}}, {"resources_max": {"walltime": "24:00:00"}}
    route = {"queue_type": "Route", "route_destinations": "short,inner"}
    inner = {"queue_type": "Route", "route_destinations": ["long", "r"]}  # a cycle, given as a list
    queue = a_queue("r", r=route, inner=inner, short=hour, long={**day, "from_route_only": "True"})
    assert (queue.open, queue.usable, queue.max_minutes) == (True, True, 24 * 60)
    assert a_queue("r", r=route, inner=inner, short=hour, long={}).max_minutes == 0
    assert a_queue("r", r={**route, **hour}, inner=inner, short=hour, long=day).max_minutes == 60


@pytest.mark.parametrize(
    ("fields", "others", "reason"),
    [
        ({"from_route_only": "True"}, {}, "it takes jobs only from routing queues, and no routing queue leads to it"),
        ({"queue_type": "Route", "route_destinations": "b@far"}, {}, "it is a routing queue to b@far, where Hodei cannot follow a job"),
        ({"queue_type": "Route", "route_destinations": "b"}, {"b": {"enabled": "False"}}, "it is a routing queue, and none of its destinations accepts jobs"),
        ({"queue_type": "Route"}, {}, "it is a routing queue, and none of its destinations accepts jobs"),
    ],
)  # fmt: skip
def test_an_unusable_queue_has_a_reason(fields, others, reason):
    queue = a_queue("a", a=fields, **others)
    assert (queue.open, queue.usable, queue.reason) == (False, False, reason)


def test_a_stopped_queue_is_closed_but_usable():
    queue = a_queue("a", a={"started": "False"})
    assert (queue.open, queue.usable, queue.reason) == (False, True, "it is disabled or stopped in PBS")
