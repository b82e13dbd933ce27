"""The batch script and what it writes down, run by a real bash; and words that can not be handed on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hodei.backends.hpc.record import Record, parse_record, read_record
from hodei.backends.hpc.script import array_script, batch_script
from hodei.model.errors import BackendRefused


def a_script(files: Path, *argv: str, env: dict[str, str] | None = None, workdir: str = "/") -> str:
    return batch_script(
        files=str(files), argv=argv, env=env or {}, workdir=workdir, job_variable="SLURM_JOB_ID", node_variable="SLURMD_NODENAME"
    )  # fmt: skip


def run(script: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    given = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "17", "SLURMD_NODENAME": "n1", **env}
    return subprocess.run(
        ["/bin/bash", "-p"], input=script.encode(), env=given, capture_output=True, timeout=30, check=False
    )


@pytest.mark.parametrize(
    ("argv", "code"),
    [(("/bin/true",), 0), (("/bin/sh", "-c", "exit 7"), 7), (("no-such-program",), 127), (("/etc/passwd",), 126),
     (("exit", "3"), 127), (("/bin/sh", "-c", "kill -KILL $$"), 137)],
)  # fmt: skip
def test_the_exit_code_is_written_down_and_handed_on(tmp_path, argv, code):
    done = run(a_script(tmp_path / "1.0.1", *argv))
    record = read_record(str(tmp_path / "1.0.1"))
    assert (done.returncode, record.exit_code) == (code, code)
    assert (record.began, record.job, record.node, bool(record.pid)) == (True, "17", "n1", True)
    assert 0 < record.began_ms <= record.ended_ms


def test_a_directory_that_is_not_there_is_told_apart_from_a_failure(tmp_path):
    done = run(a_script(tmp_path / "r", "/bin/true", workdir="/no/such/place"))
    record = read_record(str(tmp_path / "r"))
    assert (done.returncode, record.no_workdir, record.pid) == (125, True, 0)


def test_names_that_bash_keeps_for_itself_reach_the_program_too(tmp_path):
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
    seen = dict(pair.split("=", 1) for pair in done.stdout.decode().split("\0") if pair)
    assert {name: seen.get(name) for name in env} == env
    assert done.stderr == b""


def test_a_secret_that_could_only_be_handed_on_where_others_read_it_is_refused(tmp_path):
    with pytest.raises(BackendRefused, match=r"db\.password"):
        a_script(tmp_path / "r", "/bin/true", env={"db.password": "hush"})


@pytest.mark.parametrize(
    ("argv", "env"),
    [((), {}), (("",), {}), (("a\0b",), {}), (("x" * 200_000,), {}), (("\ud800",), {}), (("true",), {"": "x"}), (("true",), {"a=b": "x"}),
     (("a=b",), {"IFS": "x"})],
    ids=["nothing", "an empty name", "a NUL", "too long", "no Unicode", "no name", "= in a name", "= in the command behind env"],
)  # fmt: skip
def test_what_can_not_be_handed_on_is_refused(tmp_path, argv, env):
    with pytest.raises(BackendRefused):
        a_script(tmp_path / "r", *argv, env=env)


def test_an_array_runs_the_script_of_its_element_and_keeps_its_output_apart(tmp_path):
    scripts = [
        (a_script(tmp_path / str(n), "/bin/sh", "-c", f"echo {n}; echo e{n} >&2; exit {n}"), f"{tmp_path}/{n}.out", f"{tmp_path}/{n}.err")
        for n in range(3)
    ]  # fmt: skip
    done = run(array_script(scripts, "SLURM_ARRAY_TASK_ID"), SLURM_ARRAY_TASK_ID="2")
    assert (done.returncode, done.stdout) == (2, b"")
    assert (tmp_path / "2.out").read_text() == "2\n"
    assert (tmp_path / "2.err").read_text() == "e2\n"
    assert not (tmp_path / "1.out").exists()


def test_of_several_tries_the_latest_counts_and_a_torn_line_does_not():
    text = "began 7 n1 100.500\npid 12\nbegan 8 n2 200,250\npid 13\nexit 3 201.000001\nexit 9"
    record = parse_record(text)
    assert (record.job, record.pid, record.exit_code, record.began_ms, record.ended_ms) == (
        "8",
        13,
        3,
        200_250,
        201_000,
    )


def test_no_record_is_no_end(tmp_path):
    assert read_record(str(tmp_path / "none")) == Record()
