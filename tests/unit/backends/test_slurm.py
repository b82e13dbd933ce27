"""Parsing of Slurm's output, recorded from a real Slurm 22.05, and its errors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from hodei.backends.hpc.commands import CommandResult
from hodei.backends.hpc.ports import OutcomeUnknown, Submission
from hodei.backends.hpc.slurm import SlurmCommands, parse_sacct, parse_squeue, sbatch_command
from hodei.backends.hpc.slurm_parse import (
    cluster,
    job_status,
    parse_exit_code,
    parse_gres,
    parse_node,
    parse_partition,
    phase_of,
    rest_node,
    rest_partition,
)
from hodei.backends.hpc.slurm_rest import SlurmRest, _Response, submit_fields
from hodei.model.errors import IN_DOUBT, NOT_REACHED, BackendError, BackendRefused

SAMPLES = Path(__file__).parent / "hpc_samples"
SUBMISSION = Submission(
    mark="hodei:i:hpc:1.0.1",
    name="a name",
    script="#!/bin/bash\n",
    partition="main",
    stdout="/out/1%.out",
    stderr="/out/1.err",
)


@pytest.mark.parametrize(
    ("text", "code"),
    [("0", 0), ("768", 3), ("15", 143), ("9", 137), ("253", 137), ("3:0", 3), ("0:15", 143), ("0:125", 137), ("", None), ("x", None)],
)  # fmt: skip
def test_exit_codes_are_wait_statuses_or_pairs(text, code):
    assert parse_exit_code(text) == code


@pytest.mark.parametrize(
    ("state", "phase", "reason_code"),
    [
        ("PENDING", "pending", ""), ("CONFIGURING", "pending", ""), ("REQUEUED", "pending", ""), ("RUNNING", "running", ""),
        ("COMPLETING", "running", ""), ("SUSPENDED", "running", ""), ("STOPPED", "running", ""),
        ("COMPLETED", "ended", ""), ("FAILED", "ended", ""), ("CANCELLED by 0", "ended", "killed"),
        ("TIMEOUT", "ended", "timeout"), ("OUT_OF_MEMORY", "ended", "oom"), ("NODE_FAIL", "ended", "lost"),
        ("PREEMPTED", "ended", "lost"), ("BOOT_FAIL", "ended", "lost"),
    ],
)  # fmt: skip
def test_every_state_has_a_phase_and_a_reason_code(state, phase, reason_code):
    status = job_status(job="1", mark="m", state=state, code="0")
    assert (status.phase, status.reason_code) == (phase, reason_code)


def test_an_unknown_state_does_not_end_a_run():
    assert phase_of("SOMETHING_NEW") == "running"


def test_a_job_cancelled_before_its_start_has_no_exit_code():
    assert job_status(job="1", mark="m", state="CANCELLED", code="0").exit_code is None


def test_columns_of_squeue_are_cut_by_width():
    line = (
        f"{'7':14}{'N/A':14}{'PENDING':24}{'(Nodes required for job are DOWN, DRAINED)':80}{'0':14}{'1794810068':24}{'N/A':24}"
        f"{'N/A':24}{'hodei:i:hpc:1.0.1':200}"
    )
    (status,) = parse_squeue(line + "\nsome noise\n")
    assert (status.job, status.mark, status.phase) == ("7", "hodei:i:hpc:1.0.1", "pending")
    assert (status.reason, status.submit_s) == ("(Nodes required for job are DOWN, DRAINED)", 1794810068)


def test_elements_of_an_array_have_their_own_marks():
    line = f"{'7':14}{'3':14}{'RUNNING':24}{'None':80}{'0':14}{'5':24}{'6':24}{'N/A':24}{'hodei:i:hpc:+1.0.1':200}"
    (status,) = parse_squeue(line)
    assert (status.job, status.mark, status.phase) == ("7_3", "hodei:i:hpc:+1.0.1#3", "running")


def test_the_history_has_exit_codes_as_pairs():
    (status,) = parse_sacct("2|FAILED|3:0|1794810068|1794810069|1794810070\nnot a row\n")
    assert (status.job, status.phase, status.exit_code, status.submit_s, status.end_s) == (
        "2",
        "ended",
        3,
        1794810068,
        1794810070,
    )


def test_nodes_of_scontrol_are_parsed():
    lines = (SAMPLES / "scontrol-show-node-oneliner.txt").read_text().splitlines()
    nodes = [parse_node(line) for line in lines if line.startswith("NodeName=")]
    first = nodes[0]
    assert (first.name, first.cpus, first.memory_mib, first.state) == ("n1", 4, 4000, "MIXED")
    assert (first.partitions, first.gres, first.features) == (("main", "high", "gpu"), "gpu:a100:2", "gpu,fast")
    assert (first.load_percent, first.free_mib) == (1410, 12025)


def test_commands_and_rest_give_the_same_nodes():
    lines = (SAMPLES / "scontrol-show-node-oneliner.txt").read_text().splitlines()
    by_command = [parse_node(line) for line in lines if line.startswith("NodeName=")]
    by_rest = [rest_node(fields) for fields in json.loads((SAMPLES / "rest-nodes.json").read_text())["nodes"]]
    partitions = [
        rest_partition(fields) for fields in json.loads((SAMPLES / "rest-partitions.json").read_text())["partitions"]
    ]
    assert cluster(by_command, partitions) == cluster(by_rest, partitions)
    parsed = cluster(by_rest, partitions)
    main = next(partition for partition in parsed.partitions if partition.name == "main")
    assert (main.nodes, main.default, main.max_minutes) == (("n1", "n2", "n3", "n4"), True, 0)
    assert main.largest == {"cpu": 8000, "memory": 8000 << 20, "gpu": 2000}
    assert parsed.nodes[0].labels == {"slurm.hodei.io/feature-gpu": "true", "slurm.hodei.io/feature-fast": "true"}


@pytest.mark.parametrize(
    ("state", "ready", "cordoned"),
    [
        ("IDLE", True, False), ("MIXED", True, False), ("ALLOCATED+PLANNED", True, False), ("IDLE+DRAIN", True, True),
        ("DOWN*", False, False), ("IDLE*", False, False), ("DOWN+DRAIN", False, True), ("IDLE~", True, False),
        ("IDLE+POWERED_DOWN", False, False),
    ],
)  # fmt: skip
def test_node_states_map_to_ready_and_cordoned(state, ready, cordoned):
    line = f"NodeName=n1 CPUTot=4 RealMemory=100 State={state} Partitions=main Reason=it is [broken] [root@now]"
    (node,) = cluster([parse_node(line)], []).nodes
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
    assert parse_gres(text) == (amounts, kind)


@pytest.mark.parametrize(("text", "expected"), [("UNLIMITED", 0), ("01:00:00", 60), ("1-02:30:00", 1590), ("", 0)])
def test_time_limits_are_in_minutes(text, expected):
    assert parse_partition(f"PartitionName=main State=UP MaxTime={text}").max_minutes == expected


def test_jobs_of_slurmrestd_are_parsed():
    jobs = msgspec.json.decode((SAMPLES / "rest-jobs.json").read_bytes(), type=_Response).jobs
    status = {job.status().job: job.status() for job in jobs}
    assert (status["1"].phase, status["1"].exit_code, status["1"].mark) == ("ended", 0, "sched.job=1")
    assert (status["2"].phase, status["2"].exit_code) == ("ended", 3)
    assert (status["3"].phase, status["3"].exit_code) == ("running", None)
    assert (status["4"].reason_code, status["4"].exit_code) == ("oom", 137)
    assert (status["6"].phase, status["6"].reason) == ("pending", "PartitionConfig")


def test_an_unknown_job_has_its_own_error_number():
    body = (SAMPLES / "rest-job-unknown.txt").read_text().partition("\n\n")[2]
    (error,) = msgspec.json.decode(body, type=_Response).errors
    assert error.number == 2017


def test_every_option_of_sbatch_is_one_argument_with_its_value():
    command = sbatch_command(
        msgspec.structs.replace(SUBMISSION, node="n1", gpus=2, gpu_type="a100", minutes=5), requeue=False
    )
    assert command[0] == "sbatch"
    assert all(argument.startswith("--") for argument in command[1:])
    assert {"--job-name=a name", "--nodelist=n1", "--gres=gpu:a100:2", "--time=5", "--no-requeue"} < set(command)
    assert "--output=/out/1%%.out" in command


def test_rest_has_the_fields_of_sbatch_options_or_refuses():
    fields = submit_fields(
        msgspec.structs.replace(SUBMISSION, node="n1", options=(("constraint", "fast"),)), requeue=False
    )
    assert (fields["nodelist"], fields["constraints"], fields["no_requeue"]) == ("n1", "fast", True)
    with pytest.raises(BackendRefused, match="REST"):
        submit_fields(msgspec.structs.replace(SUBMISSION, options=(("hint", "compute_bound"),)), requeue=False)


class FakeCommands:
    def __init__(self, answer) -> None:
        self.answer = answer

    async def run(self, argv, **_):
        return self.answer


FAILED = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    ("code", "stderr", "error", "name"),
    [
        (None, "sbatch did not answer within 25 s", OutcomeUnknown, IN_DOUBT),
        (-15, "", OutcomeUnknown, IN_DOUBT),
        (1, f"{FAILED}Socket timed out on send/recv operation", OutcomeUnknown, IN_DOUBT),
        (1, f"{FAILED}Zero Bytes were transmitted or received", OutcomeUnknown, IN_DOUBT),
        (1, f"{FAILED}Unable to contact slurm controller (receive failure)", OutcomeUnknown, IN_DOUBT),
        (1, f"{FAILED}Message receive failure", OutcomeUnknown, IN_DOUBT),
        (1, f"{FAILED}Unable to contact slurm controller (connect failure)", BackendError, NOT_REACHED),
        (1, f"{FAILED}Job violates accounting/QOS policy", BackendError, "BACKEND_ERROR"),
        (1, f"{FAILED}Invalid partition name specified", BackendRefused, "BACKEND_REFUSED"),
    ],
)
def test_the_error_of_sbatch_decides_whether_the_outcome_is_known(code, stderr, error, name):
    with pytest.raises(error) as raised:
        asyncio.run(SlurmCommands(FakeCommands(CommandResult(code, b"", stderr.encode()))).submit(SUBMISSION))
    assert (type(raised.value), raised.value.code) == (error, name)


@pytest.mark.parametrize(
    ("status", "body", "error", "name"),
    [
        (504, "<html>Gateway Time-out</html>", OutcomeUnknown, IN_DOUBT),
        (502, "", OutcomeUnknown, IN_DOUBT),
        (200, "", OutcomeUnknown, IN_DOUBT),
        (500, '{"errors": [{"error_code": 5004, "error": "Socket timed out"}]}', OutcomeUnknown, IN_DOUBT),
        (500, '{"errors": [{"error_number": 1800, "error": "Unable to contact slurm controller"}]}', BackendError, NOT_REACHED),
        (500, '{"errors": [{"error_code": 2000, "error": "Invalid partition name specified"}]}', BackendRefused, "BACKEND_REFUSED"),
        (401, "Authentication failure", BackendError, "BACKEND_ERROR"),
    ],
)  # fmt: skip
def test_the_response_of_slurmrestd_or_a_proxy_decides_whether_the_outcome_is_known(status, body, error, name):
    system = SlurmRest("unix:/nowhere", version="v0.0.38")

    async def exchange(*_: object) -> tuple[int, bytes]:
        return status, body.encode()

    system._exchange = exchange
    with pytest.raises(error) as raised:
        asyncio.run(system.submit(SUBMISSION))
    assert (type(raised.value), raised.value.code) == (error, name)
