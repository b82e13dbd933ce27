"""The host agent with real processes: kills, restarts, limits and timeouts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_host import DEADLINE_S, ReconnectingRecorder, agent_pid, alive, an_order, kill_agent, local_agent, until
from hodei.agent.limits import enforcement
from hodei.agent.spawn import NOT_TRIED, SCRIPT, SHELL, STATUS_FD
from hodei.backends.agent_link import Link
from hodei.backends.local import LocalBackend, VirtualNode
from hodei.model.effects import Start
from hodei.model.errors import BackendError, NotFound, StaleEpoch
from hodei.model.outcome import StopReason

pytestmark = pytest.mark.real
ENFORCED = enforcement()
needs_memory_groups = pytest.mark.skipif(
    not ENFORCED["memory"].startswith("cgroup"), reason="no cgroup with a memory controller is writable here"
)
needs_cpu_groups = pytest.mark.skipif(
    not ENFORCED["cpu"].startswith("cgroup"), reason="no cgroup with a cpu controller is writable here"
)


async def observe_through_outages(backend: LocalBackend) -> None:
    """On a busy machine a server sees first that its connection to the agent is closed, and only then why."""
    while True:
        with contextlib.suppress(BackendError):
            await backend.observe()


async def pid_of(recorder: ReconnectingRecorder, run: str) -> int:
    """The pid that the script of the run has printed first."""
    return int((await recorder.log_has(run, b"\n")).split()[0])


async def start_with_retries(recorder: ReconnectingRecorder, orders: list[Start]) -> None:
    """As a server does: repeat a call that failed, and later send again the starts that the agent does not know."""
    recorder.ordered |= {order.run.id: order for order in orders}
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                assert await recorder.backend.start(orders) == {}
                return
            except BackendError:
                continue


def test_runs_are_restored_after_the_agent_was_killed(tmp_path):
    async def scenario() -> None:
        gate = tmp_path / "gate"
        async with local_agent(tmp_path / "home") as recorder:
            wait = f"echo ran >> {tmp_path}/proof-$HODEI_JOB_ID; until [ -e {gate} ]; do sleep 0.02; done; exit $1"
            orders = [an_order(job, "/bin/sh", "-c", wait, "sh", str(job)) for job in (1, 2, 3)]
            await recorder.backend.start(orders)
            for order in orders:
                await recorder.running(order.run.id)
            await kill_agent(tmp_path / "home")
            await start_with_retries(recorder, orders)
            gate.touch()
            ends = [await recorder.end_of(order.run.id) for order in orders]
            assert [(end.state, end.exit_code) for end in ends] == [("failed", 1), ("failed", 2), ("failed", 3)]
            assert [(tmp_path / f"proof-{job}").read_text() for job in (1, 2, 3)] == ["ran\n"] * 3

    asyncio.run(scenario())


def test_a_run_that_ended_without_an_agent_keeps_its_exit_code(tmp_path):
    async def scenario() -> None:
        home, gate = tmp_path / "home", tmp_path / "gate"
        async with local_agent(home) as recorder:
            script = f"echo $$; until [ -e {gate} ]; do sleep 0.02; done; exit 42"
            await recorder.backend.start([an_order(1, "/bin/sh", "-c", script)])
            pid = await pid_of(recorder, "1.0.1")
            await recorder.backend.close()
            await kill_agent(home)
            gate.touch()
            await until(lambda: not alive(pid))
        async with local_agent(home, epoch=2) as recorder:
            end = await recorder.end_of("1.0.1")
            assert (end.state, end.exit_code) == ("failed", 42)

    asyncio.run(scenario())


def test_a_run_that_was_killed_with_its_wrapper_is_lost(tmp_path):
    async def scenario() -> None:
        home = tmp_path / "home"
        async with local_agent(home) as recorder:
            await recorder.backend.start([an_order(1, "/bin/sh", "-c", "echo $PPID $$; sleep 300")])
            wrapper, command = map(int, (await recorder.log_has("1.0.1", b"\n")).split())
            await recorder.backend.close()
            await kill_agent(home)
            os.killpg(wrapper, signal.SIGKILL)
            await until(lambda: not alive(command) and not alive(wrapper))
        async with local_agent(home, epoch=2) as recorder:
            end = await recorder.end_of("1.0.1")
            assert (end.state, end.exit_code, end.reason_code) == ("lost", None, "lost")

    asyncio.run(scenario())


def test_the_remaining_process_group_of_a_run_that_ended_without_an_agent_is_killed(tmp_path):
    async def scenario() -> None:
        home, gate = tmp_path / "home", tmp_path / "gate"
        async with local_agent(home) as recorder:
            script = f"sleep 300 & echo $!; until [ -e {gate} ]; do sleep 0.02; done"
            await recorder.backend.start([an_order(1, "/bin/sh", "-c", script)])
            left = await pid_of(recorder, "1.0.1")
            await recorder.backend.close()
            await kill_agent(home)
            gate.touch()
        async with local_agent(home, epoch=2) as recorder:
            assert (await recorder.end_of("1.0.1")).state == "succeeded"
            await until(lambda: not alive(left))

    asyncio.run(scenario())


def test_many_short_runs_end_exactly_once_while_the_agent_is_killed_repeatedly(tmp_path):
    async def scenario() -> None:
        home = tmp_path / "home"
        async with local_agent(home) as recorder:
            script = f"echo ran >> {tmp_path}/proof-$HODEI_JOB_ID; exit $((HODEI_JOB_ID % 3))"
            orders = [an_order(job, "/bin/sh", "-c", script) for job in range(1, 101)]
            for at in range(0, 100, 20):
                order = asyncio.create_task(start_with_retries(recorder, orders[at : at + 20]))
                await asyncio.sleep(0)
                await kill_agent(home)
                await order
            ends = [await recorder.end_of(order.run.id) for order in orders]
            for order, end in zip(orders, ends, strict=True):
                proof = (tmp_path / f"proof-{order.run.job}").read_text()
                assert (end.state != "lost", end.exit_code, proof) == (True, order.run.job % 3, "ran\n")

    asyncio.run(scenario())


def test_a_terminated_agent_exits_and_its_runs_continue(tmp_path):
    async def scenario() -> None:
        home, gate = tmp_path / "home", tmp_path / "gate"
        async with local_agent(home) as recorder:
            script = f"echo $$; until [ -e {gate} ]; do sleep 0.02; done; exit 7"
            await recorder.backend.start([an_order(1, "/bin/sh", "-c", script)])
            pid, agent = await pid_of(recorder, "1.0.1"), agent_pid(home)
            os.kill(agent, signal.SIGTERM)
            await until(lambda: not alive(agent))
            assert alive(pid)
            gate.touch()
            assert (await recorder.end_of("1.0.1")).exit_code == 7

    asyncio.run(scenario())


def test_repeated_stop_signals_end_an_agent_without_a_traceback(tmp_path):
    for number in range(5):
        home = tmp_path / str(number)
        command = [sys.executable, "-m", "hodei.agent", "--home", str(home)]
        agent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            asyncio.run(until((home / "agent.sock").exists))
            deadline = time.monotonic() + DEADLINE_S
            while agent.poll() is None and time.monotonic() < deadline:
                agent.send_signal(signal.SIGTERM)
                time.sleep(0.0005)  # more signals than the event loop can read would fill its pipe
        finally:
            agent.kill()
            _, errors = agent.communicate()
        assert (agent.returncode, errors) == (0, "")


def test_a_wrapper_that_cannot_write_its_status_file_does_not_start_the_command(tmp_path):
    """A run with an empty status file counts as not started."""
    proof = tmp_path / "proof"
    opens = f'exec {STATUS_FD}>/dev/full; exec "$0" "$@"'
    words = ["-c", SCRIPT, "hodei", "1.0.1", "/", "0", "", "--", "touch", str(proof)]
    done = subprocess.run([SHELL, "-c", opens, SHELL, *words], check=False, timeout=DEADLINE_S)
    assert (done.returncode, proof.exists()) == (NOT_TRIED, False)


def test_a_timeout_holds_while_no_server_is_connected(tmp_path):
    async def scenario() -> None:
        home = tmp_path / "home"
        async with local_agent(home) as recorder:
            await recorder.backend.start([an_order(1, "/bin/sh", "-c", "echo $$; exec sleep 300", timeout_ms=3000)])
            pid = await pid_of(recorder, "1.0.1")
            await recorder.backend.close()
            await until(lambda: not alive(pid))
        async with local_agent(home, epoch=2) as recorder:
            end = await recorder.end_of("1.0.1")
            assert (end.state, end.exit_code, end.reason_code) == ("failed", 143, "timeout")

    asyncio.run(scenario())


def test_a_timeout_holds_after_the_agent_was_killed(tmp_path):
    async def scenario() -> None:
        async with local_agent(tmp_path / "home") as recorder:
            await recorder.backend.start([an_order(1, "/bin/sh", "-c", "echo $$; exec sleep 300", timeout_ms=3000)])
            await pid_of(recorder, "1.0.1")
            await kill_agent(tmp_path / "home")
            assert (await recorder.end_of("1.0.1")).reason_code == "timeout"

    asyncio.run(scenario())


def test_a_command_that_ignores_term_is_killed_after_its_grace_with_its_children(tmp_path):
    async def scenario() -> None:
        async with local_agent(tmp_path / "home") as recorder:
            script = "trap '' TERM; sleep 300 & echo $!; echo ready; while :; do sleep 0.05; done"
            await recorder.backend.start([an_order(1, "/bin/sh", "-c", script)])
            child = int((await recorder.log_has("1.0.1", b"ready")).split()[0])
            await recorder.stop("1.0.1", grace_ms=100, reason=StopReason("cancelled", "by ann"))
            end = await recorder.end_of("1.0.1")
            assert (end.state, end.exit_code, end.reason) == ("stopped", 137, "cancelled by ann")
            await until(lambda: not alive(child))

    asyncio.run(scenario())


@needs_memory_groups
def test_a_stop_kills_children_that_left_the_process_group(tmp_path):
    async def scenario() -> None:
        async with local_agent(tmp_path / "home") as recorder:
            script = "setsid sh -c 'echo $$; exec sleep 300' & sleep 300"
            await recorder.backend.start([an_order(1, "/bin/sh", "-c", script, limits={"memory": 256 << 20})])
            daemon = await pid_of(recorder, "1.0.1")
            await recorder.stop("1.0.1", grace_ms=5000)
            assert (await recorder.end_of("1.0.1")).state == "stopped"
            await until(lambda: not alive(daemon))

    asyncio.run(scenario())


def test_the_remaining_process_group_of_an_ended_run_is_killed(tmp_path):
    async def scenario() -> None:
        async with local_agent(tmp_path / "home") as recorder:
            await recorder.run(an_order(1, "/bin/sh", "-c", "sleep 300 & echo $!"))
            left = await pid_of(recorder, "1.0.1")
            await until(lambda: not alive(left))

    asyncio.run(scenario())


@needs_memory_groups
def test_a_run_over_its_memory_limit_ends_as_oom_and_its_group_is_removed(tmp_path):
    async def scenario() -> None:
        async with local_agent(tmp_path / "home", installation="oomtest") as recorder:
            hungry = "b = bytearray(200 << 20); print(len(b))"
            limits = {"memory": 64 << 20}
            modest, end = await recorder.run(
                an_order(1, sys.executable, "-S", "-c", "print(1)", limits=limits),
                an_order(2, sys.executable, "-S", "-c", hungry, limits=limits),
            )
            assert modest.state == "succeeded"
            assert (end.state, end.exit_code, end.reason_code) == ("failed", 137, "oom")
            await until(lambda: not list(Path("/sys/fs/cgroup").glob("**/hodei-*/oomtest.*")))

    asyncio.run(scenario())


@needs_cpu_groups
def test_a_cpu_limit_is_a_cgroup_quota(tmp_path):
    async def scenario() -> None:
        async with local_agent(tmp_path / "home", installation="cputest") as recorder:
            script = "cat /proc/self/cgroup; echo ready; sleep 300"
            await recorder.backend.start([an_order(1, "/bin/sh", "-c", script, limits={"cpu": 250})])
            await recorder.log_has("1.0.1", b"ready")
            (group,) = Path("/sys/fs/cgroup").glob("**/hodei-*/cputest.1.0.1")
            quota = group / "cpu.cfs_quota_us"
            assert (quota.read_text() if quota.exists() else (group / "cpu.max").read_text()).split()[0] == "25000"
            await recorder.stop("1.0.1", grace_ms=0)
            await recorder.end_of("1.0.1")
            await until(lambda: not group.exists())

    asyncio.run(scenario())


def test_the_oom_score_of_a_run_follows_its_quality_of_service(tmp_path):
    async def scenario() -> None:
        show = ("/bin/sh", "-c", "cat /proc/self/oom_score_adj")
        full = {"cpu": 1000, "memory": 64 << 20}
        quarter = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
        async with local_agent(tmp_path) as recorder:
            await recorder.run(
                an_order(1, *show, cpu=1, memory=64 << 20, limits=full),
                an_order(2, *show, cpu=1, memory=quarter),
                an_order(3, *show, cpu=0, memory=0),
            )
            scores = [int(await recorder.log(f"{job}.0.1")) for job in (1, 2, 3)]
        own = int(Path("/proc/self/oom_score_adj").read_text())
        # Lowering the score needs CAP_SYS_RESOURCE.
        capabilities = next(line for line in Path("/proc/self/status").read_text().splitlines() if "CapEff" in line)
        assert scores[0] == (-997 if int(capabilities.split()[1], 16) >> 24 & 1 else own)
        assert scores[1:] == [750, 1000]

    asyncio.run(scenario())


@needs_cpu_groups
def test_the_cpu_weight_of_a_run_follows_its_request(tmp_path):
    async def scenario() -> None:
        async with local_agent(tmp_path / "home", installation="weights") as recorder:
            wait = ("/bin/sh", "-c", "echo ready; exec sleep 300")
            await recorder.backend.start(
                [an_order(1, *wait, cpu=0, memory=0), an_order(2, *wait, cpu=2, limits={"cpu": 3000})]
            )
            found = []
            for run in ("1.0.1", "2.0.1"):
                await recorder.log_has(run, b"ready")
                (group,) = Path("/sys/fs/cgroup").glob(f"**/hodei-*/weights.{run}")
                shares = group / "cpu.shares"
                found.append(int((shares if shares.exists() else group / "cpu.weight").read_text()))
                await recorder.stop(run, grace_ms=0)
                await recorder.end_of(run)
            assert found in ([2, 2048], [1, 79])  # cgroup v1, v2

    asyncio.run(scenario())


def test_runs_of_a_virtual_node_stay_on_its_cores(tmp_path):
    core = max(os.sched_getaffinity(0))

    async def scenario() -> None:
        async with local_agent(
            tmp_path / "home", nodes=[VirtualNode("n1", cpus=(core,)), VirtualNode("n2")]
        ) as recorder:
            await recorder.run(an_order(1, sys.executable, "-S", "-c", "import os; print(os.sched_getaffinity(0))"))
            assert await recorder.log("1.0.1") == f"{{{core}}}\n".encode()
            assert [node.name for node in await recorder.backend.nodes()] == ["n1", "n2"]

    asyncio.run(scenario())


def test_output_past_the_cap_keeps_its_head_and_its_tail(tmp_path):
    async def scenario() -> None:
        async with local_agent(tmp_path / "home") as recorder:
            link = recorder.backend._agent.link
            order = {"run": "1.0.1", "argv": ["/bin/sh", "-c", "seq 1 200000"], "log_cap": 65_536}
            await link.request("start", runs=[order])
            await recorder.end_of("1.0.1")
            output = await recorder.log("1.0.1")
            assert output.startswith(b"1\n2\n3\n")
            assert output.endswith(b"199999\n200000\n")
            assert b"bytes dropped ...]\n" in output
            assert len(output) < 70_000
            file = (tmp_path / "home" / "runs" / "test" / "1.0.1" / "stdout").stat()
            assert file.st_blocks * 512 < 100_000

    asyncio.run(scenario())


def test_a_log_that_is_not_a_regular_file_of_the_run_is_refused(tmp_path):
    async def scenario() -> None:
        async with local_agent(tmp_path / "home") as recorder:
            await recorder.run(an_order(1, "echo", "hi"), an_order(2, "echo", "hi"))
            runs = tmp_path / "home" / "runs" / "test"
            (runs / "1.0.1" / "stdout").unlink()
            (runs / "1.0.1" / "stdout").mkdir()
            (runs / "2.0.1" / "stdout").unlink()
            (runs / "2.0.1" / "stdout").symlink_to("/etc/passwd")
            for run in ("1.0.1", "2.0.1"):
                with pytest.raises(NotFound, match="stdout"):
                    await recorder.backend.logs(run, "stdout", 0, 100)
            link: Link = recorder.backend._agent.link
            for run in ("../1.0.1", "..", "1.0.1/x", "", "a\0b"):
                with pytest.raises(Exception, match="run's id"):
                    await link.request("logs", run=run, stream="stdout", offset=0, limit=1)

    asyncio.run(scenario())


TEXT = st.text(
    st.one_of(st.sampled_from("$`\"'\\;&|<>(){}[]*?~#!\n\r\t -=%@"), st.characters(exclude_categories=("Cs",))),
    max_size=30,
).filter(lambda text: "\0" not in text)


def test_no_string_is_interpreted_by_a_shell(tmp_path):
    canary = tmp_path / "canary"
    attacks = [
        f"$(touch {canary})",
        f"`touch {canary}`",
        f"; touch {canary}",
        f"\n touch {canary}\n",
        f"'; touch {canary} #",
    ]

    async def check(recorder: ReconnectingRecorder, batches: list[list[str]]) -> None:
        orders = []
        for words in batches:
            check.job += 1  # type: ignore[attr-defined]
            env = {"WORD": words[0] if words else ""}
            orders.append(an_order(check.job, "/usr/bin/printf", r"%s\0", *words, *attacks, env=env))  # type: ignore[attr-defined]
        for words, end in zip(batches, await recorder.run(*orders), strict=True):
            assert end.state == "succeeded"
            expected = "".join(f"{word}\0" for word in [*words, *attacks])
            assert (await recorder.log(end.run)).decode() == expected

    check.job = 0  # type: ignore[attr-defined]
    with asyncio.Runner() as runner:
        host = local_agent(tmp_path / "home")
        recorder = runner.run(host.__aenter__())

        @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(st.lists(TEXT, max_size=5), min_size=10, max_size=30))
        def every_batch(batches: list[list[str]]) -> None:
            runner.run(check(recorder, batches))

        try:
            every_batch()
        finally:
            runner.run(host.__aexit__(None, None, None))
    assert not canary.exists()


def test_two_installations_on_one_agent_are_separate(tmp_path):
    async def scenario() -> None:
        async with local_agent(tmp_path, installation="one") as one, local_agent(tmp_path, installation="two") as two:
            await one.run(an_order(1, "echo", "of one"))
            await two.run(an_order(1, "echo", "of two"))
            assert await one.log("1.0.1") == b"of one\n"
            assert await two.log("1.0.1") == b"of two\n"
            assert list(await one.backend.known()) == list(await two.backend.known()) == ["1.0.1"]

    asyncio.run(scenario())


def test_a_server_with_an_older_epoch_is_refused_and_a_newer_one_takes_over(tmp_path):
    async def scenario() -> None:
        async with local_agent(tmp_path, epoch=5) as old:
            async with local_agent(tmp_path, epoch=6) as new:
                with pytest.raises(StaleEpoch):
                    await asyncio.wait_for(observe_through_outages(old.backend), DEADLINE_S)
                with pytest.raises(StaleEpoch):
                    await old.backend.start([an_order(1)])
                await new.run(an_order(1))
            await kill_agent(tmp_path)
            late = LocalBackend(home=tmp_path, installation="test", epoch=4, linger_s=1)
            with pytest.raises(StaleEpoch):
                await late.open()

    asyncio.run(scenario())


def test_a_home_with_a_very_long_path_works(tmp_path):
    home = tmp_path / ("deep" * 20) / ("deeper" * 20)

    async def scenario() -> None:
        async with local_agent(home) as recorder:
            assert (await recorder.run(an_order(1)))[0].state == "succeeded"
            socket = Path((home / "agent.addr").read_text())
            assert stat.S_IMODE(socket.stat().st_mode) == 0o600
            assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700

    asyncio.run(scenario())


def test_one_agent_runs_per_home_and_exits_when_it_is_not_needed(tmp_path):
    async def scenario() -> None:
        async with local_agent(tmp_path) as recorder:
            second = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "hodei.agent", "--home", tmp_path, stderr=asyncio.subprocess.PIPE
            )
            _, stderr = await asyncio.wait_for(second.communicate(), DEADLINE_S)
            assert (second.returncode, b"another agent" in stderr) == (3, True)
            assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
            assert stat.S_IMODE((tmp_path / "agent.sock").stat().st_mode) == 0o600
            agent = agent_pid(tmp_path)
            await recorder.backend.close()
            await until(lambda: not alive(agent))
            assert not (tmp_path / "agent.sock").exists()

    asyncio.run(scenario())


def test_invalid_input_on_the_socket_gets_a_clear_error_and_changes_nothing(tmp_path):
    async def scenario() -> None:
        async with local_agent(tmp_path) as recorder:
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "agent.sock"))
            for line in (b"not json", b"[1]", b'{"id":1,"op":"start"}', b'{"id":2,"op":"x"}', b"[" * 100_000):
                writer.write(line + b"\n")
                assert b'"error"' in await asyncio.wait_for(reader.readline(), DEADLINE_S)
            writer.close()
            assert (await recorder.run(an_order(1)))[0].state == "succeeded"

    asyncio.run(scenario())
