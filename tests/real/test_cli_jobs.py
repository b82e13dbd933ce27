"""Jobs through the real command line, server and processes."""

from __future__ import annotations

import json
import os
import select
import time
from pathlib import Path

import pytest
import yaml

from agent_host import alive
from real.installation import DEADLINE_S, Installation, pids_in, until

pytestmark = pytest.mark.real

TINY = '[[nodes]]\nname = "tiny"\ncpu = "1"\nmemory = "1Gi"\n'
QUICK_RETRIES = '[scheduling.retry]\nbase = "200ms"\nfactor = 2\njitter = 0.0\n'


def test_hodei_run_behaves_like_a_local_command(installation: Installation, tmp_path: Path) -> None:
    installation.up()
    result = installation.hodei("run", "--", "sh", "-c", "echo to stdout; echo to stderr >&2; exit 3")
    assert (result.code, result.out) == (3, "to stdout\n")
    assert result.err.splitlines()[0] == "to stderr"
    assert installation.hodei("run", "--", "sh", "-c", "kill -TERM $$").code == 128 + 15
    assert installation.hodei("run", "--", "printf", "no newline").out == "no newline"
    assert installation.hodei("run", "--", "/no/such/program").code == 127
    big = installation.hodei("run", "--", "sh", "-c", "seq 200000; seq 100000 >&2")
    assert big.code == 0
    assert big.lines == [str(number) for number in range(1, 200_001)]
    assert len(big.err.splitlines()) == 100_000
    installation.stop()
    assert installation.hodei("run", "--", "true").code == 7


def test_submit_takes_files_with_several_documents_and_stdin(installation: Installation, tmp_path: Path) -> None:
    installation.up()
    file = tmp_path / "jobs.yaml"
    file.write_text("name: one\ncommand: echo first\n---\nname: two\ncommand: [echo, second]\ncpu: 100m\n")
    assert installation.ok("submit", str(file)).lines == ["job 1 (one) submitted", "job 2 (two) submitted"]
    assert installation.ok(
        "submit", "-", "-o", "name", input='{"name": "three", "command": ["echo", "third"]}'
    ).lines == ["3"]
    assert installation.ok("submit", "--wait", "-q", "--", "true").lines == ["4"]
    assert installation.hodei("submit", "--wait", "-q", "--", "false").code == 10
    assert installation.hodei("wait", "1-3").code == 0
    assert [installation.ok("logs", id).out for id in ("1", "two", "three")] == ["first\n", "second\n", "third\n"]
    again = [installation.ok("submit", "-q", "--key", "nightly", "-", input="command: 'true'").out for _ in range(2)]
    assert again[0] == again[1]


def test_jobs_are_listed_in_every_format(installation: Installation) -> None:
    installation.up()
    ids = [installation.submit("true", name=f"job-{number}", labels={"part": str(number)}) for number in range(3)]
    installation.ended(*ids)
    assert installation.ok("jobs").out == ""
    assert [line.split()[1] for line in installation.ok("jobs", "-a", "--no-headers").lines] == [
        "job-2",
        "job-1",
        "job-0",
    ]
    as_json = installation.ok("jobs", "-a", "-o", "json").json
    assert [job["id"] for job in as_json] == [3, 2, 1]
    assert {job["state"] for job in as_json} == {"succeeded"}
    assert [json.loads(line) for line in installation.ok("jobs", "-a", "-o", "jsonl").lines] == as_json
    assert yaml.safe_load(installation.ok("jobs", "-a", "-o", "yaml").out) == as_json
    assert installation.ok("jobs", "-a", "-o", "name").lines == ["3", "2", "1"]
    assert installation.ok("jobs", "-l", "part in (0, 2)", "-a", "-o", "name").lines == ["3", "1"]
    assert installation.ok("jobs", "--state", "failed", "-o", "name").out == ""
    shown = installation.ok("job", "show", "job-1", "-o", "json").json
    assert (shown["job"]["id"], shown["runs"][0]["exit_code"]) == (2, 0)
    assert "succeeded" in installation.ok("job", "show", "last").out
    kinds = [event["kind"] for event in installation.ok("job", "history", "1", "-o", "json").json]
    assert kinds == ["job.submitted", "job.scheduled", "job.started", "run.ended", "job.ended"]


def test_the_yaml_of_job_show_can_be_submitted_again(installation: Installation, tmp_path: Path) -> None:
    installation.up()
    first = installation.submit("sh", "-c", "exit 4", labels={"team": "a"}, env={"A": "b"}, priority="high", retries=0)
    installation.ended(first)
    spec = yaml.safe_load(installation.ok("job", "show", str(first), "-o", "yaml").out)["spec"]
    second = int(installation.ok("submit", "-q", "-", input=json.dumps(spec)).out)
    assert installation.ended(second)[0].spec == installation.job(first).spec


def test_logs_are_followed_while_a_slow_job_writes(installation: Installation, tmp_path: Path) -> None:
    installation.up()
    # After each line the job waits for the test, so each line is seen while the job still runs.
    script = f"for n in 1 2 3; do echo line $n; while [ ! -e {tmp_path}/$n ]; do sleep 0.02; done; done; echo bye >&2"
    id = installation.submit("sh", "-c", script)
    follower = installation.begin("logs", "-f", str(id))
    assert follower.stdout is not None
    for number in (1, 2, 3):
        assert select.select([follower.stdout], [], [], DEADLINE_S)[0], f"line {number} was not written"
        assert follower.stdout.readline() == f"line {number}\n".encode()
        assert installation.state(id) == "running"
        (tmp_path / str(number)).touch()
    installation.ended(id)
    assert follower.wait(DEADLINE_S) == 0
    assert follower.stdout.read() == b""
    assert installation.ok("logs", "--stderr", str(id)).out == "bye\n"
    assert installation.ok("logs", "--tail", "1", str(id)).out == "line 3\n"


def test_wait_ends_at_its_timeout(installation: Installation) -> None:
    installation.up()
    slow, bad = installation.submit("sleep", "600"), installation.submit("sh", "-c", "exit 9")
    began = time.monotonic()
    assert installation.hodei("wait", "--timeout", "500ms", str(slow)).code == 6
    assert 0.4 < time.monotonic() - began < DEADLINE_S
    assert installation.hodei("wait", str(bad)).code == 10
    installation.ok("cancel", str(slow))
    assert installation.hodei("wait", str(slow), "--timeout", "20s").code == 10
    assert installation.hodei("wait", "999").code == 3


def test_cancel_ends_a_pending_job_and_the_whole_process_group_of_a_running_one(
    installation: Installation, tmp_path: Path
) -> None:
    installation.configure(TINY).up()
    script = f"sleep 600 & echo $! $$ >>{tmp_path}/pids; (sleep 601 & echo $! >>{tmp_path}/pids; wait) & wait"
    running = installation.submit("sh", "-c", script, cpu=1)
    waiting = installation.submit("true", cpu=1)
    group = pids_in(tmp_path / "pids", 3)
    assert installation.state(waiting) == "pending"
    assert installation.ok("cancel", str(waiting), "--reason", "not needed").out == f"job {waiting} (true) cancelled\n"
    assert installation.ok("cancel", str(running)).out == f"job {running} (sh) cancel requested\n"
    first, second = installation.ended(waiting, running)
    assert (first.job.state, first.job.reason, first.runs) == ("cancelled", "not needed", [])
    assert (second.job.state, second.runs[0].state) == ("cancelled", "stopped")
    until(lambda: not any(map(alive, group)), "the whole group has exited")
    assert installation.hodei("cancel", str(running)).code == 8


def test_a_job_that_ignores_term_is_killed_after_its_grace_period(installation: Installation, tmp_path: Path) -> None:
    installation.up()
    id = installation.submit(
        "sh", "-c", f"trap '' TERM; echo $$ >{tmp_path}/pids; while :; do sleep 0.1; done", grace="500ms"
    )
    (pid,) = pids_in(tmp_path / "pids", 1)
    began = time.monotonic()
    installation.ok("cancel", str(id))
    assert installation.ended(id)[0].job.exit_code == 128 + 9
    assert 0.4 < time.monotonic() - began < DEADLINE_S
    assert not alive(pid)


def test_a_held_job_does_not_start_until_it_is_released(installation: Installation) -> None:
    installation.configure(TINY).up()
    first = installation.submit("sleep", "600", cpu=1)
    second = installation.submit("true", cpu=1)
    installation.until_state(first, "running")
    installation.ok("hold", str(second))
    installation.ok("cancel", str(first))
    installation.ended(first)
    installation.works()  # another job has been scheduled meanwhile, so the held one could have been too
    assert installation.state(second) == "held"
    assert installation.ok("why", str(second), "-o", "json").json["status"] == "held"
    installation.ok("release", str(second))
    assert installation.ended(second)[0].job.state == "succeeded"
    assert installation.hodei("release", str(second)).code == 8


def test_an_ended_job_can_be_requeued(installation: Installation, tmp_path: Path) -> None:
    installation.up()
    id = installation.submit("sh", "-c", f"echo $HODEI_ATTEMPT | tee -a {tmp_path}/tries; test $HODEI_ATTEMPT = 2")
    assert installation.ended(id)[0].job.state == "failed"
    installation.ok("requeue", str(id))
    (detail,) = installation.ended(id)
    assert (detail.job.state, detail.job.exit_code) == ("succeeded", 0)
    assert [(run.attempt, run.exit_code) for run in detail.runs] == [(1, 1), (2, 0)]
    assert (tmp_path / "tries").read_text().split() == ["1", "2"]
    assert [installation.ok("logs", str(id), "--attempt", str(n)).out for n in (1, 2)] == ["1\n", "2\n"]


def test_a_running_job_that_is_requeued_is_stopped_first(installation: Installation, tmp_path: Path) -> None:
    installation.up()
    id = installation.submit("sh", "-c", f"echo $$ >>{tmp_path}/pids; test $HODEI_ATTEMPT = 2 || sleep 600")
    pids_in(tmp_path / "pids", 1)
    installation.ok("requeue", str(id))
    (detail,) = installation.ended(id)
    assert [run.state for run in detail.runs] == ["stopped", "succeeded"]
    first, _ = pids_in(tmp_path / "pids", 2)
    assert not alive(first)


def test_retries_are_new_runs_after_growing_pauses(installation: Installation) -> None:
    installation.configure(QUICK_RETRIES).up()
    id = installation.submit("sh", "-c", "date +%s%N; exit 5", retries=2)
    (detail,) = installation.ended(id)
    assert (detail.job.state, detail.job.exit_code, detail.job.reason_code) == ("failed", 5, "EXIT_CODE")
    assert [run.attempt for run in detail.runs] == [1, 2, 3]
    at = [int(installation.log_of(id, attempt=attempt)) / 1e9 for attempt in (1, 2, 3)]
    assert at[1] - at[0] >= 0.2
    assert at[2] - at[1] >= 0.4
    succeeds = installation.submit("sh", "-c", "test $HODEI_ATTEMPT = 2", retries=5)
    assert [run.exit_code for run in installation.ended(succeeds)[0].runs] == [1, 0]
    never = installation.submit("false", retries=3, restart="never")
    assert len(installation.ended(never)[0].runs) == 1


def test_a_timeout_holds_while_the_server_is_down(installation: Installation, tmp_path: Path) -> None:
    installation.up()
    id = installation.submit("sh", "-c", f"echo $$ >{tmp_path}/pids; sleep 600", timeout="3s", grace="1s")
    (pid,) = pids_in(tmp_path / "pids", 1)
    installation.kill()
    until(lambda: not alive(pid), "the job is stopped although no server runs")
    installation.up()
    (detail,) = installation.ended(id)
    assert (detail.job.state, detail.job.reason_code) == ("failed", "TIMEOUT")


def test_a_job_over_its_memory_limit_ends_as_oom(installation: Installation) -> None:
    installation.up()
    limits = {check["name"]: check["found"] for check in installation.ok("doctor", "-o", "json").json}
    if "cgroup" not in limits.get("limits: memory", ""):
        pytest.skip("no memory cgroup is writable here, so that a limit is not reported as such")
    hungry = "x = []\nwhile True: x.append(bytearray(1 << 20))"
    id = installation.submit("python3", "-c", hungry, limits={"memory": "48Mi"}, memory="48Mi")
    (detail,) = installation.ended(id)
    assert (detail.job.state, detail.job.reason_code) == ("failed", "OUT_OF_MEMORY")
    assert detail.job.exit_code == 128 + 9
    installation.works()


def test_the_environment_is_exactly_as_requested(installation: Installation, tmp_path: Path) -> None:
    installation.up(env={"SECRET_OF_THE_SERVER": "1", "HODEI_TOKEN": "1"})
    awkward = {"PLAIN": "1", "SPACES": " a  b ", "QUOTES": "\"'`$(id)\\", "LINES": "a\nb", "EMPTY": "", "PWD": "/odd"}
    id = installation.submit("env", "-0", env=awkward, workdir="/")
    installation.ended(id)
    env = dict(entry.split("=", 1) for entry in installation.log_of(id).split("\0") if entry)
    assert {name: env.pop(name, None) for name in awkward} == awkward
    own = {name: env.pop(name) for name in list(env) if name.startswith("HODEI_")}
    assert own == {
        "HODEI_JOB_ID": str(id), "HODEI_RUN_ID": f"{id}.0.1", "HODEI_TASK": "main", "HODEI_RANK": "0",
        "HODEI_WORLD_SIZE": "1", "HODEI_ATTEMPT": "1", "HODEI_NODE": own["HODEI_NODE"], "HODEI_PROJECT": "default",
        "HODEI_QOS": "burstable", "HODEI_MEMBER": "0", "HODEI_MIN_WORLD_SIZE": "1", "HODEI_MAX_WORLD_SIZE": "1",
        "HODEI_ADDRESSES": "127.0.0.1", "HODEI_MASTER_ADDRESS": "127.0.0.1",
        "HODEI_CHECKPOINT_FILE": own["HODEI_CHECKPOINT_FILE"],
    }  # fmt: skip
    assert set(env) <= {"PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ"}
    assert os.environ["PATH"] == env["PATH"]


def test_the_members_of_a_gang_get_their_ranks(installation: Installation) -> None:
    installation.up()
    document = {
        "apiVersion": "hodei/v1", "kind": "Job", "metadata": {"name": "gang"},
        "spec": {"tasks": [
            {"name": "lead", "command": "echo $HODEI_TASK $HODEI_RANK of $HODEI_WORLD_SIZE",
             "resources": {"requests": {"cpu": "10m", "memory": "1Mi"}}},
            {"name": "worker", "count": 3, "command": "echo $HODEI_TASK $HODEI_RANK of $HODEI_WORLD_SIZE",
             "resources": {"requests": {"cpu": "10m", "memory": "1Mi"}}},
        ]},
    }  # fmt: skip
    id = int(installation.ok("submit", "-q", "-", input=json.dumps(document)).out)
    (detail,) = installation.ended(id)
    assert (detail.job.state, len(detail.runs)) == ("succeeded", 4)
    outputs = [installation.ok("logs", str(id), "--member", str(member)).out for member in range(4)]
    assert outputs == ["lead 0 of 4\n", "worker 1 of 4\n", "worker 2 of 4\n", "worker 3 of 4\n"]


def test_the_first_failure_in_a_gang_stops_the_others(installation: Installation, tmp_path: Path) -> None:
    installation.up()
    script = f"echo $$ >>{tmp_path}/pids; test $HODEI_RANK = 1 && exit 6; sleep 600"
    id = installation.submit("sh", "-c", script, count=3)
    (detail,) = installation.ended(id)
    assert (detail.job.state, detail.job.exit_code) == ("failed", 6)
    assert sorted(run.state for run in detail.runs) == ["failed", "stopped", "stopped"]
    until(lambda: not any(map(alive, pids_in(tmp_path / "pids", 2))), "all members have exited")
