"""The batch script and its record, run by a real bash; and commands that it refuses."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hodei.backends.hpc.script import array_script, batch_script
from hodei.backends.hpc.slurm import SlurmCommands
from hodei.backends.hpc.tracked_run import SEALED, Record, parse_record, read_record, seal
from hodei.model.errors import BackendRefused


def a_script(
    files: Path,
    *argv: str,
    env: dict[str, str] | None = None,
    workdir: str = "/",
    claim: str = "first",
    rerun: bool = False,
) -> str:
    return batch_script(
        files=str(files), argv=argv, env=env or {}, workdir=workdir, claim=claim, job_variable="SLURM_JOB_ID",
        node_variable="SLURMD_NODENAME", element_id=SlurmCommands.element_id, rerun=rerun,
    )  # fmt: skip


def run(script: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    environment = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "17", "SLURMD_NODENAME": "n1", **env}
    # Under nohup, children would ignore HUP.
    command = ["/usr/bin/env", "--default-signal=HUP", "/bin/bash", "-p"]
    return subprocess.run(command, input=script.encode(), env=environment, capture_output=True, timeout=30, check=False)


@pytest.mark.parametrize(
    ("argv", "code"),
    [(("/bin/true",), 0), (("/bin/sh", "-c", "exit 7"), 7), (("no-such-program",), 127), (("/etc/passwd",), 126),
     (("exit", "3"), 127), (("/bin/sh", "-c", "kill -KILL $$"), 137)],
)  # fmt: skip
def test_the_exit_code_is_recorded_and_returned(tmp_path, argv, code):
    done = run(a_script(tmp_path / "1.0.1", *argv))
    record = read_record(str(tmp_path / "1.0.1"))
    assert (done.returncode, record.exit_code) == (code, code)
    assert (record.started, record.raw_job, record.node, bool(record.pid)) == (True, "17", "n1", True)
    assert 0 < record.started_ms <= record.ended_ms


def test_a_missing_working_directory_is_distinguished_from_a_failure(tmp_path):
    done = run(a_script(tmp_path / "r", "/bin/true", workdir="/no/such/place"))
    record = read_record(str(tmp_path / "r"))
    assert (done.returncode, record.no_workdir, record.pid) == (125, True, 0)


def test_variables_with_names_reserved_by_bash_reach_the_program(tmp_path):
    env = {
        "IFS": "x",
        "OPTIND": "abc",
        "PWD": "/x",
        "with.dot": "1",
        "LC_ALL": "no_SUCH",
        "BASH_ENV": "/x",
        "PATH": "/bin",
        "_": "y",
    }
    done = run(a_script(tmp_path / "r", "/usr/bin/env", "-0", env=env))
    received = dict(pair.split("=", 1) for pair in done.stdout.decode().split("\0") if pair)
    assert {name: received.get(name) for name in env} == env
    assert done.stderr == b""


def test_a_secret_that_could_only_be_passed_on_a_command_line_is_refused(tmp_path):
    with pytest.raises(BackendRefused, match=r"db\.password"):
        a_script(tmp_path / "r", "/bin/true", env={"db.password": "hidden"})


@pytest.mark.parametrize(
    ("argv", "env"),
    [((), {}), (("",), {}), (("a\0b",), {}), (("x" * 200_000,), {}), (("\ud800",), {}), (("true",), {"": "x"}), (("true",), {"a=b": "x"}),
     (("a=b",), {"IFS": "x"})],
    ids=["empty", "an empty name", "a NUL", "too long", "no Unicode", "no name", "= in a name", "= in the command after env"],
)  # fmt: skip
def test_commands_and_variables_that_bash_cannot_pass_on_are_refused(tmp_path, argv, env):
    with pytest.raises(BackendRefused):
        a_script(tmp_path / "r", *argv, env=env)


def test_an_array_runs_the_script_of_its_element_with_separate_output(tmp_path):
    scripts = [
        (a_script(tmp_path / str(n), "/bin/sh", "-c", f"echo {n}; echo e{n} >&2; exit {n}"), f"{tmp_path}/{n}.out", f"{tmp_path}/{n}.err")
        for n in range(3)
    ]  # fmt: skip
    done = run(array_script(scripts, "SLURM_ARRAY_TASK_ID"), SLURM_ARRAY_TASK_ID="2")
    assert (done.returncode, done.stdout) == (2, b"")
    assert (tmp_path / "2.out").read_text() == "2\n"
    assert (tmp_path / "2.err").read_text() == "e2\n"
    assert not (tmp_path / "1.out").exists()


def test_the_latest_start_counts_and_a_torn_line_does_not():
    text = "started 7 n1 100.500\npid 12\nstarted 8 n2 200,250\npid 13\nexit 3 201.000001\nexit 9"
    record = parse_record(text)
    assert (record.job, record.pid, record.exit_code) == ("8", 13, 3)
    assert (record.started_ms, record.ended_ms) == (200_250, 201_000)


def test_the_cpu_time_of_the_command_and_its_children_is_recorded(tmp_path):
    burn = "sh -c 'i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done'; true"
    assert run(a_script(tmp_path / "1.0.1", "/bin/sh", "-c", burn)).returncode == 0
    before = os.times()
    subprocess.run(["sh", "-c", burn], check=True)
    used = os.times()
    expected = (used.children_user + used.children_system - before.children_user - before.children_system) * 1000
    cpu_ms = read_record(str(tmp_path / "1.0.1")).cpu_ms
    assert cpu_ms is not None
    assert expected / 3 < cpu_ms < expected * 3 + 50


@pytest.mark.parametrize(
    ("lines", "cpu_ms"),
    [
        ("0m0.001s 0m0.002s\n1m0.250s 0m0,5s\nexit 0 1.000\n", 60_750),
        ("exit 0 1.000\n", None),
        ("0m0.001s 0mx\n1m0.250s 0m0.\n", None),
    ],
)
def test_cpu_time_is_read_from_the_record(lines, cpu_ms):
    assert parse_record(f"claim a\nstarted 7 n1 5.000 \n{lines}").cpu_ms == cpu_ms


def test_a_missing_record_is_empty(tmp_path):
    assert read_record(str(tmp_path / "none")) == Record()


@pytest.mark.parametrize("signal", ["TERM", "KILL", "SEGV", "ABRT", "HUP", "USR1", "BUS", "FPE", "ILL", "TRAP"])
@pytest.mark.parametrize("in_an_array", [False, True], ids=["alone", "in an array"])
def test_a_run_ended_by_a_signal_shows_neither_its_environment_nor_its_command(tmp_path, signal, in_an_array):
    env = {"DB_PASSWORD": "hidden-1", "with.dot": "hidden-2", "PS4": "hidden-3", "EMPTY": ""}
    script = a_script(tmp_path / "r", "/bin/sh", "-c", f"kill -{signal} $$", "--password=hidden-4", env=env)
    out, err = tmp_path / "r.out", tmp_path / "r.err"
    done = run(array_script([(script, str(out), str(err))], "N") if in_an_array else script, N="0")
    output = done.stdout + done.stderr
    if in_an_array:
        output += out.read_bytes() + err.read_bytes()
    assert done.returncode > 128
    assert output == b""


def test_stderr_of_the_command_and_of_its_start_is_in_the_output(tmp_path):
    assert run(a_script(tmp_path / "a", "/bin/sh", "-c", "echo oh >&2")).stderr == b"oh\n"
    assert b"no-such-program" in run(a_script(tmp_path / "b", "no-such-program")).stderr


@pytest.mark.parametrize("rerun", [False, True], ids=["restarts not allowed", "restarts allowed"])
def test_a_second_script_of_a_run_does_nothing_once_one_has_started(tmp_path, rerun):
    proof, argv = tmp_path / "proof", ("/bin/sh", "-c", f"echo ran >>{tmp_path}/proof")
    codes = []
    for claim in ("first", "second", "first"):  # the third is a restart of the first job by the system
        done = run(a_script(tmp_path / "r", *argv, claim=claim, rerun=rerun), SLURM_JOB_ID=claim)
        codes.append(done.returncode)
        assert done.stderr == b""
        assert read_record(str(tmp_path / "r")).job == "first"
    assert codes == [0, 125, 0 if rerun else 125]
    assert proof.read_text() == ("ran\nran\n" if rerun else "ran\n")


def test_one_of_many_concurrent_scripts_of_a_run_runs(tmp_path):
    proof = tmp_path / "proof"
    scripts = [a_script(tmp_path / "r", "/bin/sh", "-c", f"echo ran >>{proof}", claim=str(n)) for n in range(20)]
    processes = [
        subprocess.Popen(["/bin/bash", "-p", "-c", script], env={"PATH": "/usr/bin:/bin"}) for script in scripts
    ]
    assert sorted(process.wait(60) for process in processes) == [0] + [125] * 19
    assert proof.read_text() == "ran\n"


def test_a_sealed_run_never_starts_and_a_started_run_cannot_be_sealed(tmp_path):
    proof, script = tmp_path / "proof", "echo ran >>proof"
    assert seal(str(tmp_path / "r"))
    assert seal(str(tmp_path / "r")), "sealing is idempotent"
    assert run(a_script(tmp_path / "r", "/bin/sh", "-c", script, workdir=str(tmp_path))).returncode == 125
    assert (read_record(str(tmp_path / "r")).claim, proof.exists()) == (SEALED, False)
    assert run(a_script(tmp_path / "s", "/bin/true")).returncode == 0
    assert not seal(str(tmp_path / "s"))
    assert not seal(str(tmp_path / "no" / "such" / "folder"))


def test_a_run_whose_record_cannot_be_created_does_not_start(tmp_path):
    done = run(a_script(tmp_path / "no-such-folder" / "r", "/bin/sh", "-c", f"touch {tmp_path}/proof"))
    assert (done.returncode, (tmp_path / "proof").exists()) == (125, False)


def test_the_id_of_an_array_element_is_the_one_that_the_queue_shows(tmp_path):
    run(a_script(tmp_path / "r", "/bin/true"), SLURM_JOB_ID="19", SLURM_ARRAY_JOB_ID="17", SLURM_ARRAY_TASK_ID="2")
    record = read_record(str(tmp_path / "r"))
    assert (record.raw_job, record.job) == ("19", "17_2")
    run(a_script(tmp_path / "s", "/bin/true"), SLURM_JOB_ID="19")
    assert read_record(str(tmp_path / "s")).job == "19"
