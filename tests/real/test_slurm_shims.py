"""The Slurm shims on PATH, with a real server and real local processes. `slurm/test_shims.py` compares with a real Slurm."""

from __future__ import annotations

import contextlib
import getpass
import io
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hodei.cli.shims.__main__ import main
from real.installation import DEADLINE_S, CommandResult, Installation, until

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.xdist_group("slurm_shims")]
Call = Callable[..., CommandResult]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory):
    installation = Installation(tmp_path_factory.mktemp("installation") / "home")
    nodes = (f'[[nodes]]\nname = "{name}"\ncpu = "16"\nmemory = "16Gi"\n' for name in ("n1", "n2"))
    installation.configure("".join(nodes))
    try:
        yield installation.up()
    finally:
        installation.close()


# Called in this process, because a process takes half a second to start. sinfo is not, to test one query as a process.
IN_PROCESS = ("squeue", "sacct", "scontrol", "scancel")


def call_in_process(name: str, *words: str) -> CommandResult:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main([name, *words])
    return CommandResult(ended.value.code or 0, out.getvalue(), err.getvalue())


@pytest.fixture
def call(up: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """`call("sbatch", "--wrap", "true")`: in a separate directory, with the shims first on PATH."""
    for variable in [name for name in os.environ if name.startswith("HODEI_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HODEI_HOME", str(up.home))
    bin = tmp_path / "bin"
    assert up.hodei("slurm-shims", str(bin)).code == 0
    work = tmp_path / "work"
    work.mkdir()

    def run(name: str, *words: str, env: dict[str, str] | None = None, input: str = "") -> CommandResult:
        if name in IN_PROCESS:
            return call_in_process(name, *words)
        done = subprocess.run(
            [bin / name, *words], cwd=work, capture_output=True, text=True, timeout=DEADLINE_S, check=False, input=input,
            env=up.env({"PATH": f"{bin}:{os.environ['PATH']}", **(env or {})}),
        )  # fmt: skip
        return CommandResult(done.returncode, done.stdout, done.stderr)

    run.work = work  # type: ignore[attr-defined]
    return run


def job_id(result: CommandResult) -> int:
    assert result.code == 0, result.err
    found = re.fullmatch(r"Submitted batch job (\d+)\n", result.out)
    assert found, result
    return int(found[1])


def test_a_job_runs_in_the_directory_and_with_the_variables_of_the_caller(up, call):
    script = call.work / "job.sh"
    script.write_text(
        '#!/bin/bash\n#SBATCH -J "My Job" -t 5\necho "$MINE $1 $2 $SLURM_JOB_NAME"; pwd; echo "$SLURM_SUBMIT_DIR"\n'
    )
    id = job_id(call("sbatch", "job.sh", "a", "b c", env={"MINE": "yes"}))
    assert up.ended(id)[0].job.state == "succeeded"
    assert (call.work / f"slurm-{id}.out").read_text() == f"yes a b c My Job\n{call.work}\n{call.work}\n"


def test_array_elements_have_their_indices_and_files(up, call):
    show = 'echo "$SLURM_ARRAY_JOB_ID $SLURM_ARRAY_TASK_ID $SLURM_ARRAY_TASK_COUNT $SLURM_ARRAY_TASK_MIN $SLURM_ARRAY_TASK_MAX"'
    result = call("sbatch", "--parsable", "-W", "-a", "5-12:3,20%2", "-o", "out-%A_%3a", "--wrap", show)
    id = int(result.out)
    assert result.code == 0
    read = {path.name: path.read_text() for path in call.work.glob("out-*")}
    assert read == {f"out-{id}_{index:03}": f"{id} {index} 4 5 20\n" for index in (5, 8, 11, 20)}


def test_a_dependency_on_an_array_waits_for_all_of_it(up, call):
    first = int(call("sbatch", "--parsable", "-a", "0-2", "--wrap", "sleep 0.2; exit $((SLURM_ARRAY_TASK_ID / 2))").out)
    good = job_id(call("sbatch", "-d", f"afterok:{first}", "--wrap", "true"))
    ended = job_id(call("sbatch", "-d", f"afterany:{first}", "--wrap", "true"))
    one = job_id(call("sbatch", "-d", f"afterok:{first}_1", "--wrap", "true"))
    assert [view.job.state for view in up.ended(good, ended, one)] == ["failed", "succeeded", "succeeded"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--no-such", "--wrap", "true"], 255, "no-such"),
        (["--time=bad", "--wrap", "true"], 255, "--time bad"),
        (["nofile.sh"], 1, "Unable to open file nofile.sh"),
        (["plain.sh"], 1, "does not look like a batch script"),
        (["het.sh"], 1, "heterogeneous"),
        (["-n1", ":", "-n2", "het.sh"], 1, "heterogeneous"),
        (["-H", "--wrap", "true"], 1, "hold"),
        (["-d", "afterok:999999", "--wrap", "true"], 1, "999999"),
        (["-a", "3-1", "--wrap", "true"], 1, "names no index"),
        (["--wrap", "true", "job.sh"], 1, "not permitted"),
    ],
)
def test_invalid_submissions_are_refused_with_the_exit_code_of_slurm(call, words, code, message):
    (call.work / "plain.sh").write_text("echo hi\n")
    (call.work / "het.sh").write_text("#!/bin/sh\n#SBATCH -n1\n#SBATCH hetjob\n#SBATCH -n2\ntrue\n")
    result = call("sbatch", *words)
    assert (result.code, result.out) == (code, "")
    assert message in result.err


def test_sbatch_has_wait_test_only_and_quiet(call):
    assert call("sbatch", "-W", "--wrap", "exit 3").code == 3
    assert call("sbatch", "-Q", "--wrap", "true")[:2] == (0, "")
    tested = call("sbatch", "--test-only", "--wrap", "true")
    assert (tested.code, tested.out) == (0, "")
    assert "would start on nodes" in tested.err
    assert call("sbatch", "--test-only", "-c", "9999", "--wrap", "true").code == 1
    noted = call("sbatch", "--mail-type=END", "--mail-user=a@b", "--wrap", "true")
    assert noted.code == 0
    assert "--mail-type END was left out" in noted.err


def test_squeue_shows_pending_and_running_jobs_in_the_columns_of_slurm(up, call):
    go = call.work / "go"
    wait = f"until [ -e {go} ]; do sleep 0.05; done"
    id = job_id(call("sbatch", "-J", "sleepy", "-t", "1:30", "-c", "2", "--mem=300", "--wrap", wait))
    held = job_id(call("sbatch", "-J", "second", "-d", f"afterok:{id}", "--wrap", "true"))
    array = int(call("sbatch", "--parsable", "-J", "many", "-a", "1,3,7-9%1", "--wrap", wait).out)
    up.until_state(id, "running")
    me = getpass.getuser()
    result = call("squeue", "-j", f"{id},{held}")
    head, *rows = result.lines
    assert head == "             JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)"
    assert rows[0] == f"{held:>18} {'default':>9} {'second':>8} {me[:8]:>8} PD       0:00      1 (Dependency)"
    assert re.fullmatch(rf"{id:>18} +default +sleepy +{me[:8]} +R +0:\d\d +1 \S+", rows[1])
    until(lambda: "R" in call("squeue", "-h", "-j", f"{array}_1", "-o", "%t").out, "the first element runs")
    assert call("squeue", "-h", "-n", "many", "-o", "%i %r").lines == [
        f"{array}_[3,7-9%1] JobArrayTaskLimit",
        f"{array}_1 None",
    ]
    assert len(call("squeue", "-hr", "--me", "-n", "many").lines) == 5
    assert (
        call("squeue", "-h", "-j", str(id), "-o", "%A|%T|%l|%C|%m|%a|%j").out
        == f"{id}|RUNNING|2:00|2|300M|default|sleepy\n"
    )
    assert call("squeue", "-u", "nobody-else", "-h").out == ""
    assert call("squeue", "-j", "999999")[::2] == (1, "squeue: slurm_load_jobs error: Invalid job id specified\n")
    assert call("squeue", "--no-such").code == 1
    assert "Invalid job state" in call("squeue", "-t", "X").err
    shown = call("scontrol", "show", "job", str(held)).out
    assert shown.startswith(f"JobId={held} JobName=second\n   UserId={me}")
    assert "JobState=PENDING Reason=Dependency" in shown
    assert f"ArrayJobId={array} ArrayTaskId=7" in call("scontrol", "-o", "show", "job", f"{array}_7").out
    assert call("scontrol", "show", "job", "999999")[::2] == (1, "slurm_load_jobs error: Invalid job id specified\n")
    assert call("scontrol", "hold", f"{array}_9").code == 0
    assert call("squeue", "-h", "-j", f"{array}_9", "-o", "%T %r").out == "PENDING JobHeldUser\n"
    assert call("scontrol", "hold", "999999").code == 1

    # The first element has the number of the array, and `ARRAY_1` still means that element only.
    assert call("scancel", f"{array}_1").code == 0
    up.until_state(array, "cancelled")
    assert call("scancel", f"{array}_7").code == 0
    up.until_state(array + 2, "cancelled")
    assert up.until_state(array + 1, "running", "pending").job.cancel_requested is False
    assert call("scancel", str(array)).code == 0
    until(lambda: call("squeue", "-h", "-n", "many").out == "", "no element is left")
    assert call("scancel", "-n", "second", "-t", "PD").code == 0
    up.until_state(held, "cancelled")
    assert call("scancel", "999999").code == 0
    assert call("scancel", "abc")[::2] == (1, "scancel: error: Invalid job id abc\n")
    assert call("scancel")[::2] == (1, "scancel: error: No job identification provided\n")
    go.touch()
    up.until_state(id, "succeeded")


def test_sacct_shows_how_jobs_ended(up, call):
    bad = call("sbatch", "--parsable", "-W", "-J", "a-very-long-name", "--wrap", "exit 3").out.strip()
    killed = call("sbatch", "--parsable", "-W", "--wrap", "kill -9 $$").out.strip()
    late = call("sbatch", "--parsable", "-W", "-t", "0:01", "--wrap", "sleep 60").out.strip()
    result = call("sacct", "-X", "-j", f"{bad},{killed}")
    assert result.lines[:2] == [
        "       JobID    JobName  Partition    Account  AllocCPUS      State ExitCode ",
        "------------ ---------- ---------- ---------- ---------- ---------- -------- ",
    ]
    assert result.lines[2].split() == [bad, "a-very-lo+", "default", "default", "1", "FAILED", "3:0"]
    plain = call("sacct", "-nPX", "-j", f"{bad},{killed},{late}", "--format=JobID,State,ExitCode").lines
    assert plain == [f"{bad}|FAILED|3:0", f"{killed}|FAILED|0:9", f"{late}|TIMEOUT|0:0"]
    assert call("sacct", "-np", "-j", bad, "-o", "jobid").out == f"{bad}|\n"
    assert bad in call("sacct", "-nX", "-s", "F", "-S", "now-1hour", "-o", "JobID").out.split()
    assert call("sacct", "-nX", "-A", "no-such-project").out == ""
    assert call("sacct", "-nX", "-S", "2020-01-01", "-E", "2020-01-02").out == ""
    assert call("sacct", "-S", "never").code == 1
    assert call("sacct", "-o", "nonsense")[0] == 1
    assert call("sacct", "-nj", "999999")[:2] == (0, "")


def test_srun_submits_a_job_and_starts_tasks_inside_a_job(up, call):
    assert call("srun", "sh", "-c", "echo hi; echo err >&2; exit 3")[:2] == (3, "hi\n")
    assert sorted(call("srun", "-n", "3", "sh", "-c", "echo $SLURM_PROCID/$SLURM_NTASKS").lines) == [
        "0/3",
        "1/3",
        "2/3",
    ]
    assert sorted(call("srun", "-N", "2", "sh", "-c", "echo $SLURM_PROCID/$SLURM_NTASKS").lines) == ["0/2", "1/2"]
    assert call("srun", "sh", "-c", "kill -9 $$").code == 137
    assert call("srun", "--no-such", "true").code == 255
    assert call("srun")[::2] == (1, "srun: fatal: No command given to execute.\n")
    body = "echo once; srun -l sh -c 'echo $SLURM_PROCID of $SLURM_NTASKS' | sort; srun -n1 false; echo $?; srun -n 9 true; echo $?"
    result = call("sbatch", "--parsable", "-W", "-n", "3", "-o", "out", "-e", "err", "--wrap", body)
    assert result.code == 0, result
    assert (call.work / "out").read_text() == "once\n0: 0 of 3\n1: 1 of 3\n2: 2 of 3\n1\n1\n"
    assert "More processors requested than permitted" in (call.work / "err").read_text()


def test_a_job_of_several_nodes_runs_on_that_many_nodes(up, call):
    show = "echo $SLURM_PROCID $SLURM_LOCALID $SLURM_NODEID $SLURM_NTASKS $SLURM_NNODES $SLURM_JOB_NODELIST $HODEI_NODE"
    body = f"srun sh -c '{show}'; srun -N1 -n1 echo once; scontrol show hostnames | tr '\\n' ' ' >names-$SLURM_NODEID"
    result = call("sbatch", "-W", "-N", "2", "--ntasks-per-node=2", "--mem=100M", "-o", "out", "--wrap", body)
    assert result.code == 0, result
    assert "it asks for 2 nodes" in result.err
    *lines, once = sorted((call.work / "out").read_text().splitlines())
    assert once == "once"
    assert [line.split()[:5] for line in lines] == [
        text.split() for text in ("0 0 0 4 2", "1 1 0 4 2", "2 0 1 4 2", "3 1 1 4 2")
    ]
    nodes = [line.split()[6] for line in lines]
    assert nodes in (["n1", "n1", "n2", "n2"], ["n2", "n2", "n1", "n1"])
    assert {(call.work / f"names-{node}").read_text() for node in (0, 1)} == {f"{nodes[0]} {nodes[2]} "}


def test_a_job_of_more_nodes_than_exist_stays_pending(up, call):
    refused = call("sbatch", "--test-only", "-N", "3", "--wrap", "true")
    assert "would start" not in refused.err
    id = job_id_or_0(call("sbatch", "-N", "3", "--wrap", "true"))
    if id:
        assert up.until_state(id, "pending").job.state == "pending"
        assert call("squeue", "-h", "-j", str(id), "-o", "%t").out == "PD\n"
        assert call("scancel", str(id)).code == 0


def job_id_or_0(result: CommandResult) -> int:
    return job_id(result) if result.code == 0 else 0


def test_srun_passes_standard_input_to_a_job_or_refuses(call):
    assert call("srun", "cat", input="hello\n")[:2] == (0, "hello\n")
    assert call("srun", "-n", "2", "cat", input="hello\n")[:2] == (0, "hello\nhello\n")
    large = "x" * 60_000 + "\n"
    assert call("srun", "cat", input=large)[:2] == (0, large)
    result = call("srun", "cat", input="x" * 70_000)
    assert (result.code, result.out) == (1, "")
    assert "64 KiB" in result.err
    assert "--input FILE" in result.err
    (call.work / "in.txt").write_text("file\n")
    assert call("srun", "-n", "2", "--input", "in.txt", "cat", input="no\n")[:2] == (0, "file\nfile\n")
    assert call("srun", "-i", "none", "cat", input="no\n")[:2] == (0, "")


def test_srun_writes_files_of_tasks_and_labels_them_outside_of_a_job(call):
    both = "echo out$SLURM_PROCID; echo err >&2; exit $SLURM_PROCID"
    assert call("srun", "-n", "2", "-o", "o-%t.txt", "sh", "-c", both).code == 1
    assert [(call.work / f"o-{rank}.txt").read_text() for rank in (0, 1)] == ["out0\nerr\n", "out1\nerr\n"]
    assert call("srun", "-n", "2", "-o", "o-%2t-%j", "-e", "e-%t", "sh", "-c", both).out == ""
    assert [(call.work / f"e-{rank}").read_text() for rank in (0, 1)] == ["err\n", "err\n"]
    result = call("srun", "-l", "-n", "2", "sh", "-c", both)
    assert (result.code, sorted(result.lines)) == (1, ["0: out0", "1: out1"])
    assert {"0: err", "1: err"} <= set(result.err.splitlines())


def test_srun_writes_files_of_tasks_within_a_job(call):
    show = "echo $SLURM_PROCID; echo err >&2"
    body = (
        f"srun -o step-%t.txt sh -c '{show}'; srun -o one.txt -e 'e-%j-%t' sh -c '{show}'; srun -o none sh -c 'echo no'; "
        "echo hi | srun cat; echo two >in; srun -i in cat; srun -o no/such true; echo $?"
    )
    result = call("sbatch", "--parsable", "-W", "-n", "2", "-o", "out", "-e", "/dev/null", "--wrap", body)
    assert result.code == 0, result
    read = {path.name: path.read_text() for path in call.work.iterdir()}
    id = result.out.strip()
    assert (read["step-0.txt"], read["step-1.txt"]) == ("0\nerr\n", "1\nerr\n")
    assert sorted(read["one.txt"].split()) == ["0", "1"]
    assert read[f"e-{id}-0"] == read[f"e-{id}-1"] == "err\n"
    assert read["out"] == "hi\nhi\ntwo\ntwo\n2\n"


def test_sinfo_shows_nodes_by_partition_and_state(call):
    head, *rows = call("sinfo").lines
    assert head == "PARTITION AVAIL  TIMELIMIT  NODES  STATE NODELIST"
    # Every profile is a partition.
    compute, default = rows
    assert re.fullmatch(r"compute +up +infinite +2 +(idle|mix) \S+", compute)
    assert re.fullmatch(r"default +up +infinite +2 +(idle|mix) \S+", default)
    assert call("sinfo", "-N").lines[0].split() == ["NODELIST", "NODES", "PARTITION", "STATE"]
    assert call("sinfo", "-h", "-p", "default", "-o", "%P %D").out == "default 2\n"
    assert call("sinfo", "--no-such").code == 1
