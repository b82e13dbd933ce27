"""The server stops and starts while jobs run: the jobs continue, and their ends are known."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from agent_host import alive
from real.installation import DEADLINE_S, Installation, Response, pids_in, until, wait_for_file

pytestmark = pytest.mark.real


def test_jobs_continue_while_the_server_is_stopped(installation: Installation, tmp_path: Path) -> None:
    installation.up()
    during = [
        installation.submit(*wait_for_file(tmp_path / "down", f"echo done {n}; touch {tmp_path}/ended-{n}; exit {n}"))
        for n in range(1, 6)
    ]
    across = installation.submit(*wait_for_file(tmp_path / "go", "exit 42"))
    for id in (*during, across):
        installation.until_state(id, "running")
    agent = installation.agent()
    assert installation.stop() == 0
    assert not (installation.home / "server.json").exists()
    assert installation.hodei("jobs").code == 7
    assert alive(agent)
    (tmp_path / "down").touch()  # all but one job end now, without a server
    until(lambda: len(list(tmp_path.glob("ended-*"))) == 5, "the jobs have ended")
    installation.up()
    assert installation.agent() == agent
    assert installation.state(across) == "running"
    (tmp_path / "go").touch()
    details = installation.ended(*during, across)
    assert [detail.job.exit_code for detail in details] == [1, 2, 3, 4, 5, 42]
    assert all(len(detail.runs) == 1 for detail in details)
    assert installation.log_of(during[2]) == "done 3\n"


def test_jobs_that_end_after_the_server_was_killed_are_known_to_the_next_server(
    installation: Installation, tmp_path: Path
) -> None:
    installation.up()
    ids = [
        installation.submit(*wait_for_file(tmp_path / "down", f"touch {tmp_path}/ended-{n}; exit {n}"))
        for n in range(5)
    ]
    for id in ids:
        installation.until_state(id, "running")
    installation.kill()
    (tmp_path / "down").touch()
    until(lambda: len(list(tmp_path.glob("ended-*"))) == 5, "the jobs have ended")
    installation.up()
    assert [detail.job.exit_code for detail in installation.ended(*ids)] == [0, 1, 2, 3, 4]


def test_the_server_stops_promptly_with_open_waits_streams_and_logs(installation: Installation) -> None:
    installation.up()
    id = installation.submit("sh", "-c", "while :; do echo tick; sleep 0.1; done")
    installation.until_state(id, "running")
    wait = installation.begin("wait", str(id))
    events = installation.begin("events", "-f")
    logs = installation.begin("logs", "-f", str(id))
    for command in (events, logs):
        assert command.stdout is not None
        assert command.stdout.readline()  # it is connected
    until(lambda: _has_a_connection(wait.pid), "wait is connected")
    began = time.monotonic()
    assert installation.stop() == 0
    print(f"stopped in {time.monotonic() - began:.2f} s")
    installation.up()  # the commands reconnect
    installation.ok("cancel", str(id))
    assert wait.wait(DEADLINE_S) == 10
    assert events.poll() is None
    assert logs.communicate(timeout=DEADLINE_S)[0].replace(b"tick\n", b"") == b""
    assert logs.returncode == 0


def _has_a_connection(pid: int) -> bool:
    """`wait` prints nothing until the end, and it fails at once if it was never connected."""
    try:
        return any(os.readlink(link).startswith("socket:") for link in Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:
        return False  # a file was closed meanwhile


def test_a_submit_during_shutdown_is_all_or_nothing(
    installation: Installation,
) -> None:
    installation.up()
    acknowledged: list[int] = []
    stopped = threading.Event()

    def submit() -> None:
        number = 0
        with installation.client() as client:
            while not stopped.is_set():
                number += 1
                try:
                    acknowledged.append(client.submit(command=["true"], cpu="10m", memory="1Mi", key=f"k{number}").id)
                except Exception:
                    return

    submitter = threading.Thread(target=submit)
    submitter.start()
    until(lambda: len(acknowledged) > 20, "20 jobs are acknowledged")
    assert installation.stop() == 0
    stopped.set()
    submitter.join(DEADLINE_S)
    installation.up()
    assert {detail.job.state for detail in installation.ended(*acknowledged)} == {"succeeded"}


def test_up_in_the_background_and_down_again(installation: Installation, tmp_path: Path) -> None:
    up = installation.hodei("up", "-d", "--port", "0")
    assert up.code == 0
    assert up.out.startswith("http://127.0.0.1:")
    installation.address = up.out.strip()
    assert installation.ok("run", "--", "echo", "hello").out == "hello\n"
    assert installation.ok("version", "-o", "json").code == 0
    across = installation.submit(*wait_for_file(tmp_path / "go", "exit 9"))
    assert "stopped" in installation.ok("down").out
    assert installation.hodei("down").code == 3
    assert installation.hodei("run", "--", "true").code == 7
    (tmp_path / "go").touch()
    assert installation.hodei("up", "-d", "--port", "0").code == 0
    assert installation.ended(across)[0].job.exit_code == 9
    assert installation.hodei("doctor").code == 0
    installation.ok("down")


def test_ctrl_c_of_run_cancels_the_job(installation: Installation, tmp_path: Path) -> None:
    installation.up()
    command = installation.begin("run", "--", "sh", "-c", f"echo $$ >{tmp_path}/pid; sleep 600")
    (pid,) = pids_in(tmp_path / "pid", 1)
    os.kill(command.pid, signal.SIGINT)
    assert command.wait(DEADLINE_S) == 130
    assert installation.ended(1)[0].job.state == "cancelled"
    assert not alive(pid)


@pytest.mark.parametrize("more", [(), ("--array", "0-1")], ids=["a job", "an array"])
def test_ctrl_c_of_run_shows_the_remaining_output(
    installation: Installation, tmp_path: Path, more: tuple[str, ...]
) -> None:
    installation.up()
    script = f"trap 'sleep 0.5; echo bye; echo sorry >&2; exit 0' TERM; echo $$ >>{tmp_path}/pid; while :; do sleep 0.1; done"
    command = installation.begin("run", "--cpu", "100m", *more, "--", "sh", "-c", script)
    pids = pids_in(tmp_path / "pid", 2 if more else 1)
    os.kill(command.pid, signal.SIGINT)
    out, err = command.communicate(timeout=DEADLINE_S)
    assert command.returncode == 130
    assert (out.count(b"bye\n"), err.count(b"sorry\n")) == (len(pids), len(pids)), (out, err)
    assert not any(alive(pid) for pid in pids)


def test_a_second_ctrl_c_of_run_exits_at_once(installation: Installation, tmp_path: Path) -> None:
    installation.configure('[scheduling.profiles.patient]\ngrace = "1h"\n').up()
    script = f"trap 'touch {tmp_path}/stopping' TERM; echo $$ >{tmp_path}/pid; while :; do sleep 0.1; done"
    command = installation.begin("run", "--profile", "patient", "--", "sh", "-c", script)
    (pid,) = pids_in(tmp_path / "pid", 1)
    os.kill(command.pid, signal.SIGINT)
    until((tmp_path / "stopping").exists, "the job is being stopped")
    assert command.poll() is None, "it waits for the end of the job"
    os.kill(command.pid, signal.SIGINT)
    assert command.wait(DEADLINE_S) == 130
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)
    installation.ended(1)


def test_run_and_logs_wait_for_a_killed_server(installation: Installation, tmp_path: Path) -> None:
    installation.up()
    script = f"echo one; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; echo two; exit 5"
    command = installation.begin("run", "--", "sh", "-c", script)
    assert command.stdout is not None
    assert command.stdout.readline() == b"one\n"
    installation.kill()
    (tmp_path / "go").touch()
    installation.up()
    out, _ = command.communicate(timeout=DEADLINE_S)
    assert (out, command.returncode) == (b"two\n", 5)


@pytest.mark.slow
def test_an_agent_that_hangs_delays_only_its_own_work(installation: Installation) -> None:
    installation.up()
    running = installation.submit("sh", "-c", "echo hello; sleep 600")
    installation.until_state(running, "running")
    agent = installation.agent()
    os.kill(agent, signal.SIGSTOP)
    try:
        logs: list[Response] = []
        took: list[float] = []
        reader = threading.Thread(
            target=lambda: logs.append(installation.request("GET", f"/api/v1/jobs/{running}/logs"))
        )
        reader.start()
        waiting = installation.submit("sh", "-c", "exit 3")
        installation.ok("cancel", str(running))
        for path in ("/livez", "/api/v1/jobs", "/api/v1/nodes", f"/api/v1/jobs/{waiting}/why", "/metrics"):
            answer = installation.request("GET", path)
            assert answer.status == 200
            took.append(answer.seconds)
        reader.join(DEADLINE_S)
        assert (logs[0].status, logs[0].json["code"]) == (503, "BACKEND_ERROR")
        # The logs come from the agent, so that request waits for its timeout. No other request may wait.
        assert max(took) < logs[0].seconds / 2
    finally:
        os.kill(agent, signal.SIGCONT)
    first, second = installation.ended(running, waiting)
    assert (first.job.state, second.job.exit_code) == ("cancelled", 3)
    assert len(first.runs) == len(second.runs) == 1


TWO = '[[nodes]]\nname = "a"\ncpu = "1"\nmemory = "1Gi"\n[[nodes]]\nname = "b"\ncpu = "1"\nmemory = "1Gi"\n'
ONE = '[[nodes]]\nname = "b"\ncpu = "1"\nmemory = "1Gi"\n'


def test_a_run_on_a_node_that_is_no_longer_offered_keeps_its_exit_code(
    installation: Installation, tmp_path: Path
) -> None:
    installation.configure(TWO).up()
    script = f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; exit 4"
    id = installation.submit("sh", "-c", script, node_selector={"kubernetes.io/hostname": "a"})
    waiting = installation.submit("true", node_selector={"kubernetes.io/hostname": "a"}, cpu=1)
    installation.until_state(id, "running")
    installation.stop()
    installation.configure(ONE).up()
    assert [node["name"] for node in installation.ok("nodes", "-o", "json").json] == ["b"]
    installation.works()
    (tmp_path / "go").touch()
    assert installation.ended(id)[0].job.exit_code == 4
    assert installation.ok("why", str(waiting), "-o", "json").json["status"] == "unsatisfiable"
    installation.stop()
    installation.configure(TWO).up()
    assert installation.ended(waiting)[0].job.state == "succeeded"


def test_a_job_of_a_removed_profile_is_reported_and_other_jobs_run(installation: Installation) -> None:
    night = '[scheduling.profiles.night]\nqueue = "fifo"\n'
    installation.configure(night + ONE).up()
    installation.ok("node", "cordon", "b")
    waiting = installation.submit("true", profile="night")
    running = installation.submit("true")
    installation.stop()
    installation.configure(ONE).up()
    installation.ok("node", "uncordon", "b")
    assert installation.ended(running)[0].job.state == "succeeded"
    installation.works()
    detail = installation.job(waiting)
    assert detail.job.state in ("pending", "held", "failed")
    assert "night" in f"{detail.job.reason} {installation.ok('why', str(waiting)).out}"
