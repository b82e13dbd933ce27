"""Slurm's words in ours, on what a real Slurm 22.05 printed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from hodei.backends.hpc.commands import Done
from hodei.backends.hpc.ports import Doubtful, Submission
from hodei.backends.hpc.slurm_commands import SlurmCommands, parse_sacct, parse_squeue, submit_words
from hodei.backends.hpc.slurm_nodes import (
    cluster,
    exit_code,
    gres,
    minutes,
    node_of,
    phase_of,
    rest_node,
    rest_partition,
    seen_of,
)
from hodei.backends.hpc.slurm_rest import SlurmRest, _Answer, submit_fields
from hodei.model.errors import IN_DOUBT, NOT_REACHED, BackendError, BackendRefused

SAMPLES = Path(__file__).parent / "hpc_samples"
WANTED = Submission(
    mark="hodei:i:hpc:1.0.1",
    name="a name",
    script="#!/bin/bash\n",
    line="main",
    stdout="/out/1%.out",
    stderr="/out/1.err",
)


@pytest.mark.parametrize(
    ("text", "code"),
    [("0", 0), ("768", 3), ("15", 143), ("9", 137), ("253", 137), ("3:0", 3), ("0:15", 143), ("0:125", 137), ("", None), ("x", None)],
)  # fmt: skip
def test_exit_codes_are_wait_statuses_or_pairs(text, code):
    assert exit_code(text) == code


@pytest.mark.parametrize(
    ("state", "phase", "reason_code"),
    [
        ("PENDING", "waiting", ""), ("CONFIGURING", "waiting", ""), ("REQUEUED", "waiting", ""), ("RUNNING", "running", ""),
        ("COMPLETING", "running", ""), ("SUSPENDED", "running", ""), ("STOPPED", "running", ""),
        ("COMPLETED", "ended", ""), ("FAILED", "ended", ""), ("CANCELLED by 0", "ended", "killed"),
        ("TIMEOUT", "ended", "timeout"), ("OUT_OF_MEMORY", "ended", "oom"), ("NODE_FAIL", "ended", "lost"),
        ("PREEMPTED", "ended", "lost"), ("BOOT_FAIL", "ended", "lost"),
    ],
)  # fmt: skip
def test_every_state_has_its_place(state, phase, reason_code):
    seen = seen_of(job="1", mark="m", state=state, code="0")
    assert (seen.phase, seen.reason_code) == (phase, reason_code)


def test_a_state_that_nobody_knows_ends_no_run():
    assert phase_of("SOMETHING_NEW") == "running"


def test_a_job_that_was_cancelled_before_it_began_has_no_exit_code():
    assert seen_of(job="1", mark="m", state="CANCELLED", code="0").code is None


def test_columns_of_squeue_are_cut_by_width_so_that_no_value_is_taken_for_another():
    line = (
        f"{'7':14}{'N/A':14}{'PENDING':24}{'(Nodes required for job are DOWN, DRAINED)':80}{'0':14}{'2':12}{'1794810068':24}{'N/A':24}"
        f"{'N/A':24}{'hodei:i:hpc:1.0.1':200}"
    )
    (seen,) = parse_squeue(line + "\nsome noise\n")
    assert (seen.job, seen.mark, seen.phase, seen.restarts) == ("7", "hodei:i:hpc:1.0.1", "waiting", 2)
    assert (seen.reason, seen.submit_s) == ("(Nodes required for job are DOWN, DRAINED)", 1794810068)


def test_elements_of_an_array_are_known_by_their_place_in_it():
    line = (
        f"{'7':14}{'3':14}{'RUNNING':24}{'None':80}{'0':14}{'0':12}{'5':24}{'6':24}{'N/A':24}{'hodei:i:hpc:+1.0.1':200}"
    )
    (seen,) = parse_squeue(line)
    assert (seen.job, seen.mark, seen.phase) == ("7_3", "hodei:i:hpc:+1.0.1#3", "running")


def test_the_history_tells_exit_codes_as_pairs():
    (seen,) = parse_sacct("2|FAILED|3:0|1794810068|1794810069|1794810070\nnot a row\n")
    assert (seen.job, seen.phase, seen.code, seen.submit_s, seen.end_s) == ("2", "ended", 3, 1794810068, 1794810070)


def test_nodes_are_read_from_scontrol():
    lines = (SAMPLES / "scontrol-show-node-oneliner.txt").read_text().splitlines()
    told = [node_of(line) for line in lines if line.startswith("NodeName=")]
    first = told[0]
    assert (first.name, first.cpus, first.memory_mib, first.state) == ("n1", 4, 4000, "MIXED")
    assert (first.partitions, first.gres, first.features) == (("main", "high", "gpu"), "gpu:a100:2", "gpu,fast")
    assert (first.load_percent, first.free_mib) == (1410, 12025)


def test_both_ways_of_asking_tell_the_same_of_nodes():
    lines = (SAMPLES / "scontrol-show-node-oneliner.txt").read_text().splitlines()
    by_command = [node_of(line) for line in lines if line.startswith("NodeName=")]
    by_rest = [rest_node(told) for told in json.loads((SAMPLES / "rest-nodes.json").read_text())["nodes"]]
    partitions = [
        rest_partition(told) for told in json.loads((SAMPLES / "rest-partitions.json").read_text())["partitions"]
    ]
    assert cluster(by_command, partitions) == cluster(by_rest, partitions)
    whole = cluster(by_rest, partitions)
    main = next(line for line in whole.lines if line.name == "main")
    assert (main.nodes, main.default, main.minutes) == (("n1", "n2", "n3", "n4"), True, 0)
    assert main.largest == {"cpu": 8000, "memory": 8000 << 20, "gpu": 2000}
    assert whole.nodes[0].labels == {"slurm.hodei.io/feature-gpu": "true", "slurm.hodei.io/feature-fast": "true"}


@pytest.mark.parametrize(
    ("state", "ready", "cordoned"),
    [
        ("IDLE", True, False), ("MIXED", True, False), ("ALLOCATED+PLANNED", True, False), ("IDLE+DRAIN", True, True),
        ("DOWN*", False, False), ("IDLE*", False, False), ("DOWN+DRAIN", False, True), ("IDLE~", True, False),
        ("IDLE+POWERED_DOWN", False, False),
    ],
)  # fmt: skip
def test_states_of_nodes_say_whether_they_can_be_used(state, ready, cordoned):
    line = f"NodeName=n1 CPUTot=4 RealMemory=100 State={state} Partitions=main Reason=it is [broken] [root@now]"
    (node,) = cluster([node_of(line)], []).nodes
    assert (node.ready, node.cordoned) == (ready, cordoned)
    assert ready or "it is" in node.not_ready_reason


@pytest.mark.parametrize(
    ("text", "amounts", "kind"),
    [
        ("gpu:a100:2(S:0-1)", {"gpu": 2000}, "a100"),
        ("gpu:4", {"gpu": 4000}, ""),
        ("gpu:a100:2,gpu:v100:1,fpga:3", {"gpu": 3000, "fpga": 3}, ""),
        ("gpu:tesla:2(S:0,1),shard:8", {"gpu": 2000, "shard": 8}, "tesla"),
        ("(null)", {}, ""),
    ],
)
def test_generic_resources_are_counted(text, amounts, kind):
    assert gres(text) == (amounts, kind)


@pytest.mark.parametrize(("text", "answer"), [("UNLIMITED", 0), ("01:00:00", 60), ("1-02:30:00", 1590), ("", 0)])
def test_time_limits_are_in_minutes(text, answer):
    assert minutes(text) == answer


def test_jobs_of_slurmrestd_are_read_and_what_is_not_needed_is_skipped():
    jobs = msgspec.json.decode((SAMPLES / "rest-jobs.json").read_bytes(), type=_Answer).jobs
    seen = {job.seen().job: job.seen() for job in jobs}
    assert (seen["1"].phase, seen["1"].code, seen["1"].mark) == ("ended", 0, "sched.job=1")
    assert (seen["2"].phase, seen["2"].code) == ("ended", 3)
    assert (seen["3"].phase, seen["3"].code) == ("running", None)
    assert (seen["4"].reason_code, seen["4"].code) == ("oom", 137)
    assert (seen["6"].phase, seen["6"].reason) == ("waiting", "PartitionConfig")


def test_an_unknown_job_is_an_error_with_a_number_of_its_own():
    body = (SAMPLES / "rest-job-unknown.txt").read_text().partition("\n\n")[2]
    (error,) = msgspec.json.decode(body, type=_Answer).errors
    assert error.number == 2017


def test_every_option_of_sbatch_is_one_word_with_its_value():
    words = submit_words(msgspec.structs.replace(WANTED, node="n1", gpus=2, gpu_type="a100", minutes=5), requeue=False)
    assert words[0] == "sbatch"
    assert all(word.startswith("--") for word in words[1:])
    assert {"--job-name=a name", "--nodelist=n1", "--gres=gpu:a100:2", "--time=5", "--no-requeue"} < set(words)
    assert "--output=/out/1%%.out" in words


def test_rest_says_the_same_as_sbatch_or_refuses():
    fields = submit_fields(msgspec.structs.replace(WANTED, node="n1", options=(("constraint", "fast"),)), requeue=False)
    assert (fields["nodelist"], fields["constraints"], fields["no_requeue"]) == ("n1", "fast", True)
    with pytest.raises(BackendRefused, match="REST"):
        submit_fields(msgspec.structs.replace(WANTED, options=(("hint", "compute_bound"),)), requeue=False)


class Said:
    """Commands, or a link, that say what they are told to."""

    def __init__(self, answer) -> None:
        self.answer = answer

    async def run(self, words, **_):
        return self.answer

    async def ask(self, *_, **__):
        return self.answer


FAILED = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    ("code", "said", "error", "name"),
    [
        (None, "sbatch did not answer within 25 s", Doubtful, IN_DOUBT),
        (-15, "", Doubtful, IN_DOUBT),
        (1, f"{FAILED}Socket timed out on send/recv operation", Doubtful, IN_DOUBT),
        (1, f"{FAILED}Zero Bytes were transmitted or received", Doubtful, IN_DOUBT),
        (1, f"{FAILED}Unable to contact slurm controller (receive failure)", Doubtful, IN_DOUBT),
        (1, f"{FAILED}Message receive failure", Doubtful, IN_DOUBT),
        (1, f"{FAILED}Unable to contact slurm controller (connect failure)", BackendError, NOT_REACHED),
        (1, f"{FAILED}Job violates accounting/QOS policy", BackendError, "BACKEND_ERROR"),
        (1, f"{FAILED}Invalid partition name specified", BackendRefused, "BACKEND_REFUSED"),
    ],
)
def test_what_sbatch_says_tells_whether_it_arrived(code, said, error, name):
    with pytest.raises(error) as raised:
        asyncio.run(SlurmCommands(Said(Done(code, b"", said.encode()))).submit(WANTED))
    assert (type(raised.value), raised.value.code) == (error, name)


@pytest.mark.parametrize(
    ("status", "body", "error", "name"),
    [
        (504, "<html>Gateway Time-out</html>", Doubtful, IN_DOUBT),
        (502, "", Doubtful, IN_DOUBT),
        (200, "", Doubtful, IN_DOUBT),
        (500, '{"errors": [{"error_code": 5004, "error": "Socket timed out"}]}', Doubtful, IN_DOUBT),
        (500, '{"errors": [{"error_number": 1800, "error": "Unable to contact slurm controller"}]}', BackendError, NOT_REACHED),
        (500, '{"errors": [{"error_code": 2000, "error": "Invalid partition name specified"}]}', BackendRefused, "BACKEND_REFUSED"),
        (401, "Authentication failure", BackendError, "BACKEND_ERROR"),
    ],
)  # fmt: skip
def test_what_slurmrestd_or_a_proxy_before_it_says_tells_whether_it_arrived(status, body, error, name):
    queue = SlurmRest("unix:/nowhere", version="v0.0.38")

    async def exchange(*_: object) -> tuple[int, bytes]:
        return status, body.encode()

    queue._exchange = exchange
    with pytest.raises(error) as raised:
        asyncio.run(queue.submit(WANTED))
    assert (type(raised.value), raised.value.code) == (error, name)
