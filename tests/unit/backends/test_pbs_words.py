"""PBS's words in ours, on what a real OpenPBS 23.06 printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hodei.backends.hpc import pbs_states
from hodei.backends.hpc.commands import Done
from hodei.backends.hpc.pbs_commands import parse, pbs_name, submit_words
from hodei.backends.hpc.pbs_states import seconds, seen_of, size
from hodei.backends.hpc.queue import Submission

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


def test_qsub_is_told_not_to_look_for_options_in_the_script():
    wanted = Submission(
        "hodei:i:hpc:1.0.1", "a name", "#!/bin/bash\n", "workq", "/o", "/e", node="vm[0]", cpus=2, minutes=65
    )
    words = submit_words(wanted, requeue=False)
    assert words[:3] == ("qsub", "-C", "")
    assert "select=1:ncpus=2:mem=0mb:vnode=vm[0]" in words
    assert "walltime=01:05:00" in words
    assert words[-2:] == ("-v", "HODEI_MARK=hodei:i:hpc:1.0.1")


@pytest.mark.parametrize(("name", "answer"), [("a name", "a_name"), ("--x", "x"), ("$(id)", "id_"), ("", "hodei")])
def test_names_are_such_that_pbs_takes_them(name, answer):
    assert pbs_name(name) == answer
