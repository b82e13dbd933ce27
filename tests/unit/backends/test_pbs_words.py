"""PBS's words in ours, on what a real OpenPBS 23.06 printed."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from hodei.backends.hpc import pbs_states
from hodei.backends.hpc.commands import Done
from hodei.backends.hpc.pbs_commands import PbsCommands, parse, pbs_name, put_script, submit_words
from hodei.backends.hpc.pbs_states import seconds, seen_of, size
from hodei.backends.hpc.ports import Doubtful, Submission
from hodei.model.errors import IN_DOUBT, NOT_REACHED, BackendError, BackendRefused

SAMPLES = Path(__file__).parent / "hpc_samples"


def sample(name: str) -> dict:
    text = (SAMPLES / name).read_text()
    return json.loads(text[text.find("{") : text.rfind("}") + 1])


def the_job(name: str):
    ((number, job),) = sample(name)["Jobs"].items()
    return seen_of(number, job)


@pytest.mark.parametrize(
    ("name", "phase", "code", "reason_code"),
    [
        ("qstat-f-json-running.txt", "running", None, ""),
        ("qstat-held.txt", "waiting", None, ""),
        ("qstat-suspended.txt", "running", None, ""),
        ("qstat-x-finished.txt", "ended", 3, ""),
        ("qstat-x-deleted.txt", "ended", 138, ""),
        ("qstat-x-deleted2.txt", "ended", 143, "killed"),
        ("qstat-rerun.txt", "running", None, ""),
    ],
)
def test_recorded_jobs_have_their_place(name, phase, code, reason_code):
    seen = the_job(name)
    assert (seen.phase, seen.code, seen.reason_code) == (phase, code, reason_code)


def test_a_job_that_can_never_run_waits_with_the_reason_that_pbs_gives():
    assert the_job("qstat-toobig.txt").reason.startswith("Can Never Run: Insufficient amount of resource: ncpus")


def test_a_job_that_was_run_again_says_so():
    assert the_job("qstat-rerun.txt").restarts == 1


@pytest.mark.parametrize(
    ("status", "comment", "answer"),
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
def test_exit_statuses_tell_signals_limits_and_what_pbs_itself_did(status, comment, answer):
    assert pbs_states.ended(status, comment)[:2] == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [("4592kb", 4592 << 10), ("4gb", 4 << 30), ("0b", 0), ("500mb", 500 << 20), ("2w", 16), ("x", 0)],
)
def test_sizes_have_units(text, answer):
    assert size(text) == answer


def test_times_are_as_ctime_writes_them():
    assert seconds("Sun Nov 15 18:42:00 2026") == 1794768120
    assert seconds("") == seconds(None) == seconds("Unknown") == 0


def test_vnodes_that_only_stand_for_their_host_are_no_nodes():
    nodes = json.loads((SAMPLES / "pbsnodes-av.json").read_text())["nodes"]
    queues = sample("qstat-Qf.txt")["Queue"]
    whole = pbs_states.cluster(nodes, queues, "workq")
    assert [node.name for node in whole.nodes] == ["vm[0]", "vm[1]", "vm[2]"]
    assert whole.nodes[0].capacity == {"cpu": 4000, "memory": 4 << 30, "gpu": 2000}
    assert [(line.name, line.open, line.default) for line in whole.lines] == [
        ("workq", True, True),
        ("express", True, False),
    ]
    assert whole.lines[0].largest == {"cpu": 8000, "memory": 8 << 30, "gpu": 2000}


@pytest.mark.parametrize(("state", "ready", "cordoned"), [("free", True, False), ("job-busy", True, False), ("down", False, False), ("offline", True, True), ("down,offline", False, True)])  # fmt: skip
def test_states_of_vnodes_say_whether_they_can_be_used(state, ready, cordoned):
    told = {"Mom": "vm", "state": state, "resources_available": {"ncpus": 4, "mem": "1gb"}}
    (node,) = pbs_states.cluster({"a": told}, {}).nodes
    assert (node.ready, node.cordoned) == (ready, cordoned)


def test_an_answer_may_have_words_before_it_and_no_jobs_in_it():
    raw = (SAMPLES / "qstat-finished-nox.txt").read_bytes()
    told = parse("qstat", Done(35, raw[: raw.rfind(b"}") + 1], b""))
    assert told["pbs_server"] == "vm"
    assert "Jobs" not in told


def a_submission(script_file: str = "/out/1.0.1.sh") -> Submission:
    return Submission(
        "hodei:i:hpc:1.0.1", "a name", "#!/bin/bash -p\nexit 3\n", "workq", "/o", "/e", node="vm[0]", cpus=2, minutes=65,
        script_file=script_file, claim="c1",
    )  # fmt: skip


def test_the_first_process_of_a_job_is_its_script_and_no_shell_that_a_signal_ends():
    words = submit_words(a_submission(), requeue=False)
    assert "select=1:ncpus=2:mem=0mb:vnode=vm[0]" in words
    assert "walltime=01:05:00" in words
    assert words[-7:] == ("-v", "HODEI_MARK=hodei:i:hpc:1.0.1", "--", "/bin/bash", "-l", "/out/1.0.1.sh", "c1")


def test_the_login_shell_makes_way_for_the_script(tmp_path):
    wanted = a_submission(str(tmp_path / "1.0.1.sh"))
    put_script(wanted)
    assert (tmp_path / "1.0.1.sh").stat().st_mode & 0o777 == 0o600
    (tmp_path / ".bash_profile").write_text("exit() { echo astray; }; export FROM_PROFILE=1; echo profile\n")
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    words = submit_words(wanted, requeue=False)
    done = subprocess.run(words[words.index("--") + 1 :], env=env, capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (3, b"profile\n")
    with pytest.raises(BackendError) as error:
        put_script(a_submission("/no/such/folder/1.0.1.sh"))
    assert error.value.code == NOT_REACHED


@pytest.mark.parametrize(("name", "answer"), [("a name", "a_name"), ("--x", "x"), ("$(id)", "id_"), ("", "hodei")])
def test_names_are_such_that_pbs_takes_them(name, answer):
    assert pbs_name(name) == answer


class Said:
    """Commands that say what they are told to."""

    def __init__(self, done: Done) -> None:
        self.done = done

    async def run(self, words, **_):
        return self.done


@pytest.mark.parametrize(
    ("code", "said", "error", "name"),
    [
        (None, "qsub did not answer within 25 s", Doubtful, IN_DOUBT),
        (-15, "", Doubtful, IN_DOUBT),
        (183, "qsub: Protocol error", Doubtful, IN_DOUBT),
        (104, "qsub: Connection reset by peer", Doubtful, IN_DOUBT),
        (1, "qsub: Error communicating with vm(127.0.0.1)", Doubtful, IN_DOUBT),
        (0, "nonsense", Doubtful, IN_DOUBT),
        (111, "Connection refused qsub: cannot connect to server vm (errno=111)", BackendError, NOT_REACHED),
        (110, "qsub: cannot connect to server vm (errno=110)", BackendError, NOT_REACHED),
        (186, "qsub: No server to connect to", BackendError, NOT_REACHED),
        (198, "qsub: Maximum number of jobs already in queue", BackendError, "BACKEND_ERROR"),
        (173, "qsub: Queue is not enabled", BackendError, "BACKEND_ERROR"),
        (170, "qsub: Unknown queue", BackendRefused, "BACKEND_REFUSED"),
        (187, "qsub: Unknown resource: x", BackendRefused, "BACKEND_REFUSED"),
    ],
)
def test_what_qsub_ends_with_says_whether_it_arrived(tmp_path, code, said, error, name):
    queue = PbsCommands(Said(Done(code, said.encode() if code == 0 else b"", said.encode())))
    with pytest.raises(error) as raised:
        asyncio.run(queue.submit(a_submission(str(tmp_path / "1.0.1.sh"))))
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
def test_each_of_pbs_own_statuses_has_its_meaning(reason_code, statuses):
    assert {status for status in range(-33, 0) if pbs_states.ended(status, "")[1] == reason_code} == statuses


def a_line(name: str, **queues):
    usual = {"queue_type": "Execution", "enabled": "True", "started": "True"}
    nodes = {"a": {"Mom": "vm", "state": "free", "resources_available": {"ncpus": 4, "mem": "1gb"}}}
    whole = pbs_states.cluster(nodes, {queue: {**usual, **fields} for queue, fields in queues.items()})
    return next(line for line in whole.lines if line.name == name)


def test_a_routing_queue_has_the_bound_of_the_most_patient_queue_behind_it():
    hour, day = {"resources_max": {"walltime": "01:00:00"}}, {"resources_max": {"walltime": "24:00:00"}}
    route = {"queue_type": "Route", "route_destinations": "short,inner"}
    inner = {"queue_type": "Route", "route_destinations": ["long", "r"]}  # in a ring, and as a list
    line = a_line("r", r=route, inner=inner, short=hour, long={**day, "from_route_only": "True"})
    assert (line.open, line.usable, line.minutes) == (True, True, 24 * 60)
    assert a_line("r", r=route, inner=inner, short=hour, long={}).minutes == 0
    assert a_line("r", r={**route, **hour}, inner=inner, short=hour, long=day).minutes == 60


@pytest.mark.parametrize(
    ("fields", "others", "why"),
    [
        ({"from_route_only": "True"}, {}, "it takes jobs from routing queues only, and none leads there"),
        ({"queue_type": "Route", "route_destinations": "b@far"}, {}, "it is a routing queue that leads to b@far, where a job cannot be followed"),
        ({"queue_type": "Route", "route_destinations": "b"}, {"b": {"enabled": "False"}}, "it is a routing queue, and no queue that it leads to takes jobs"),
        ({"queue_type": "Route"}, {}, "it is a routing queue, and no queue that it leads to takes jobs"),
    ],
)  # fmt: skip
def test_a_queue_that_cannot_be_used_says_why(fields, others, why):
    line = a_line("a", a=fields, **others)
    assert (line.open, line.usable, line.why) == (False, False, why)


def test_a_queue_that_is_stopped_is_closed_and_not_useless():
    line = a_line("a", a={"started": "False"})
    assert (line.open, line.usable, line.why) == (False, True, "it is disabled or stopped in PBS")
