"""What every backend promises (`ports.Backend`), each kind against its real system. How to register one: `backends.py`.

Kinds that run commands are held to what the commands did; what only some can do is asked of those alone. What the
commands are is plain POSIX, so that the smallest image has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

import pytest

from conformance.backends import Bench, Told, kinds
from hodei.model.effects import Forget, Stop, TakeCheckpoint
from hodei.model.errors import BackendError, BackendRefused, NotFound, Unsupported
from hodei.model.health import HealthCheck
from hodei.model.job import Checkpoint, Interactive
from hodei.model.lifecycle import RUN_ENDED
from hodei.model.needs import needs_of, unmet_by

# Words that mean something to every shell that would read them.
HOSTILE = (
    "a b",
    "$(id)",
    "`id`",
    "; id #",
    "'",
    '"',
    "\\",
    "*",
    "-n",
    "${HOME}",
    "a\nb",
    "%s",
    "é",
    "&& id",
    "|id",
    "!!",
)


def sh(script: str) -> tuple[str, ...]:
    return ("/bin/sh", "-c", script)


# ------------------------------------------------------------------------------------- every backend


@kinds()
def test_a_backend_says_what_it_can_do_and_that_it_is_well(backend_kind: Told):
    async def story(bench: Bench) -> None:
        assert bench.backend.capabilities == bench.kind.capabilities
        health = await bench.backend.health()
        assert health.ok, health.text
        assert 0 <= health.took_ms < 10_000

    backend_kind(story)


@kinds()
def test_nodes_carry_the_name_of_their_backend_and_stay_the_same(backend_kind: Told):
    async def story(bench: Bench) -> None:
        nodes = await bench.backend.nodes()
        assert nodes
        assert all(node.capacity["cpu"] > 0 for node in nodes)
        assert {node.backend for node in nodes} == {bench.backend.name}
        assert await bench.backend.nodes() == nodes

    backend_kind(story)


@kinds()
def test_a_run_is_seen_running_and_then_ended(backend_kind: Told):
    async def story(bench: Bench) -> None:
        (end,) = await bench.run(await bench.order(1))
        assert (end.state, end.exit_code, end.reason_code) == ("succeeded", 0, "")
        seen = [seen.state for seen in bench.heard if seen.run == "1.0.1" and seen.state != "placed"]
        assert seen[-1] == "succeeded"
        assert set(seen) <= {"running", "succeeded"}

    backend_kind(story)


@kinds()
def test_a_start_ordered_twice_happens_once(backend_kind: Told):
    async def story(bench: Bench) -> None:
        order = await bench.order(1)
        assert await bench.backend.start([order, order]) == {}
        assert await bench.backend.start([order]) == {}
        end = await bench.end_of("1.0.1")
        assert await bench.backend.start([order]) == {}
        assert await bench.backend.known() == {"1.0.1": end}

    backend_kind(story)


@kinds()
def test_a_run_that_was_never_ordered_is_unknown_and_not_finished(backend_kind: Told):
    async def story(bench: Bench) -> None:
        await bench.run(await bench.order(1))
        assert "2.0.1" not in await bench.backend.known()

    backend_kind(story)


@kinds()
def test_stopping_unknown_and_ended_runs_is_no_error(backend_kind: Told):
    async def story(bench: Bench) -> None:
        (end,) = await bench.run(await bench.order(1))
        await bench.stop("1.0.1")
        await bench.stop("77.0.1")
        hook = Checkpoint(signal="USR1")
        await bench.backend.stop([Stop(run, bench.backend.name, 0, "enough", hook) for run in ("1.0.1", "77.0.1")])
        assert (await bench.backend.known())["1.0.1"] == end

    backend_kind(story)


@kinds()
def test_unknown_and_ended_runs_are_not_asked_to_save_their_work(backend_kind: Told):
    async def story(bench: Bench) -> None:
        (end,) = await bench.run(await bench.order(1))
        hook = Checkpoint(signal="USR1")
        await bench.backend.checkpoint([TakeCheckpoint(run, bench.backend.name, hook) for run in ("1.0.1", "77.0.1")])
        assert await bench.backend.known() == {"1.0.1": end}

    backend_kind(story)


@kinds()
def test_an_end_stays_known_until_it_is_forgotten(backend_kind: Told):
    async def story(bench: Bench) -> None:
        await bench.run(await bench.order(1), await bench.order(2))
        await bench.backend.forget([Forget("1.0.1", bench.backend.name)])
        await bench.backend.forget([Forget("1.0.1", bench.backend.name), Forget("9.0.1", bench.backend.name)])
        assert list(await bench.backend.known()) == ["2.0.1"]

    backend_kind(story)


@kinds()
def test_many_starts_in_one_call_all_end(backend_kind: Told):
    async def story(bench: Bench) -> None:
        ends = await bench.run(*[await bench.order(job, cpu="10m", memory="1Mi") for job in range(1, 21)])
        assert {end.state for end in ends} == {"succeeded"}

    backend_kind(story)


@kinds()
def test_what_a_backend_can_not_do_it_refuses_with_what_to_do_instead(backend_kind: Told):
    async def story(bench: Bench) -> None:
        backend, can = bench.backend, bench.kind.capabilities
        asked = {
            "reserve": lambda: backend.reserve([]),
            "execute": lambda: backend.execute("1.0.1", ["/bin/true"], 1000),
            "usage": backend.usage,
            "suspend": lambda: backend.suspend(["1.0.1"]),
            "expects": backend.expected,
        }
        for name in (name for name in asked if not getattr(can, name)):
            with pytest.raises(BackendRefused) as refusal:
                await asked[name]()
            assert refusal.value.code == "BACKEND_CANNOT"
            assert backend.name in refusal.value.message
            assert refusal.value.hint

    backend_kind(story)


# --------------------------------------------------------------------- backends that run commands


@kinds("commands")
@pytest.mark.parametrize(
    ("script", "state", "code"),
    [
        pytest.param("exit 0", "succeeded", 0, id="0"),
        pytest.param("exit 1", "failed", 1, id="1"),
        pytest.param("exit 7", "failed", 7, id="7"),
        pytest.param("kill -KILL $$", "failed", 137, id="137 by a signal"),
        pytest.param("exit 137", "failed", 137, id="137 by itself"),
    ],
)
def test_exit_codes_arrive_as_they_were(backend_kind: Told, script, state, code):
    async def story(bench: Bench) -> None:
        (end,) = await bench.run(await bench.order(1, *sh(script)))
        assert (end.state, end.exit_code) == (state, code)

    backend_kind(story)


@kinds("commands")
def test_words_of_a_command_reach_the_program_as_they_are(backend_kind: Told):
    async def story(bench: Bench) -> None:
        show = sh('for word; do printf "[%s]" "$word"; done')
        (end,) = await bench.run(await bench.order(1, *show, "sh", *HOSTILE))
        assert end.exit_code == 0
        assert await bench.log("1.0.1") == "".join(f"[{word}]" for word in HOSTILE).encode()

    backend_kind(story)


@kinds("commands")
def test_a_run_has_its_environment_its_directory_and_its_name(backend_kind: Told):
    async def story(bench: Bench) -> None:
        env = {"GREETING": "hello 'you' \"there\" $HOME `id` \\", "HODEI_RANK": "99"}
        script = 'printf "%s|" "$GREETING" "$(pwd)" "$HODEI_RUN_ID" "$HODEI_JOB_ID" "$HODEI_RANK" "$HODEI_PROJECT"'
        await bench.run(await bench.order(1, *sh(script), env=env, workdir="/tmp", project="ml"))
        assert (await bench.log("1.0.1")).decode().split("|") == [env["GREETING"], "/tmp", "1.0.1", "1", "0", "ml", ""]

    backend_kind(story)


@kinds("commands")
def test_logs_are_read_from_an_offset(backend_kind: Told):
    async def story(bench: Bench) -> None:
        await bench.run(await bench.order(1, *sh("printf 0123456789")))
        logs = bench.backend.logs
        assert await bench.log_has("1.0.1", b"0123456789")
        assert await logs("1.0.1", "stdout", 0, 4) == (b"0123", 4)
        assert await logs("1.0.1", "stdout", 4, 100) == (b"456789", 10)
        assert await logs("1.0.1", "stdout", 10, 100) == (b"", 10)
        await bench.backend.forget([Forget("1.0.1", bench.backend.name)])
        with pytest.raises(NotFound):
            await logs("99.0.1", "stdout", 0, 4)

    backend_kind(story)


@kinds("commands", "two_streams")
def test_the_two_streams_are_kept_apart(backend_kind: Told):
    async def story(bench: Bench) -> None:
        await bench.run(await bench.order(1, *sh("echo out; echo error >&2")))
        assert await bench.log_has("1.0.1", b"out") == b"out\n"
        assert await bench.log("1.0.1", "stderr") == b"error\n"

    backend_kind(story)


@kinds("commands")
def test_what_a_run_says_is_there_while_it_runs(backend_kind: Told):
    async def story(bench: Bench) -> None:
        await bench.backend.start([await bench.order(1, *sh("echo ready; sleep 300"))])
        assert await bench.log_has("1.0.1", b"ready\n")
        await bench.stop("1.0.1", grace_ms=0)
        await bench.end_of("1.0.1")

    backend_kind(story)


@kinds("commands")
def test_a_stop_ends_the_run_and_carries_its_reason_back(backend_kind: Told):
    async def story(bench: Bench) -> None:
        script = "trap 'echo told to go; exit 9' TERM; echo ready; while :; do sleep 0.1; done"
        await bench.backend.start([await bench.order(1, *sh(script))])
        await bench.log_has("1.0.1", b"ready")
        await bench.stop("1.0.1", grace_ms=600_000, reason="preempted by 7")
        await bench.stop("1.0.1", grace_ms=600_000, reason="a second time")
        end = await bench.end_of("1.0.1")
        assert (end.state, end.exit_code, end.reason) == ("stopped", 9, "preempted by 7")
        assert b"told to go" in await bench.log("1.0.1")

    backend_kind(story)


@kinds("commands")
def test_a_run_that_does_not_want_to_go_is_killed_after_its_grace(backend_kind: Told):
    async def story(bench: Bench) -> None:
        script = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
        await bench.backend.start([await bench.order(1, *sh(script))])
        await bench.log_has("1.0.1", b"ready")
        await bench.stop("1.0.1", grace_ms=200)
        end = await bench.end_of("1.0.1")
        assert (end.state, end.exit_code) == ("stopped", 137)

    backend_kind(story)


@kinds("commands")
def test_a_stop_right_behind_the_start_is_not_lost(backend_kind: Told):
    async def story(bench: Bench) -> None:
        orders = [await bench.order(job, "/bin/sleep", "300", cpu="10m", memory="1Mi") for job in range(1, 6)]
        assert await bench.backend.start(orders) == {}
        for order in orders:
            await bench.stop(order.run.id, grace_ms=0)
        assert {(await bench.end_of(order.run.id)).state for order in orders} == {"stopped"}

    backend_kind(story)


@kinds("commands")
def test_what_can_never_run_is_refused_and_holds_up_nobody_else(backend_kind: Told):
    async def story(bench: Bench) -> None:
        answer = await bench.backend.start(
            [await bench.order(1, "/bin/echo", "a\0b"), await bench.order(2, "/bin/echo", "fine")]
        )
        assert {run: type(error) for run, error in answer.items()} == {"1.0.1": BackendRefused}
        assert (await bench.end_of("2.0.1")).state == "succeeded"

    backend_kind(story)


@kinds("commands", "images")
def test_an_image_that_does_not_exist_is_said_to_be_the_reason(backend_kind: Told):
    async def story(bench: Bench) -> None:
        image = "127.0.0.1:1/no-such-image:never"
        answer = await bench.backend.start([await bench.order(1, "/bin/true", image=image)])
        said = answer["1.0.1"].message if answer else (await bench.end_of("1.0.1")).reason
        assert "no-such-image" in said

    backend_kind(story)


# ------------------------------------------------------------------------------- outages and restarts


@kinds("commands")
def test_a_run_that_ends_while_we_are_down_is_found_with_its_exit_code(backend_kind: Told):
    async def story(bench: Bench) -> None:
        await bench.backend.start([await bench.order(1, *sh("sleep 1; exit 7"))])
        await bench.running("1.0.1")
        await bench.restart(after_s=2)
        end = await bench.end_of("1.0.1")
        assert (end.state, end.exit_code) == ("failed", 7)
        assert (await bench.backend.known())["1.0.1"] == end

    backend_kind(story)


@kinds("commands")
def test_a_run_goes_on_while_we_are_down_and_is_still_ours(backend_kind: Told):
    async def story(bench: Bench) -> None:
        order = await bench.order(1, *sh("echo ready; sleep 300"))
        await bench.backend.start([order])
        await bench.log_has("1.0.1", b"ready")
        await bench.restart()
        assert (await bench.backend.known())["1.0.1"].state == "running"
        assert await bench.backend.start([order]) == {}
        await bench.stop("1.0.1", grace_ms=0)
        assert (await bench.end_of("1.0.1")).state == "stopped"

    backend_kind(story)


@kinds("commands")
def test_ends_are_told_again_after_a_restart_until_they_are_forgotten(backend_kind: Told):
    async def story(bench: Bench) -> None:
        first, second = await bench.run(await bench.order(1), await bench.order(2, *sh("exit 4")))
        await bench.backend.forget([Forget(first.run, bench.backend.name)])
        await bench.restart()
        again = await bench.end_of("2.0.1")
        assert (again.state, again.exit_code) == (second.state, second.exit_code)
        assert {seen.run for seen in bench.heard} == {"2.0.1"}

    backend_kind(story)


@kinds("commands")
@pytest.mark.parametrize("late_s", [0.0, 0.001, 0.01, 0.05, 0.2], ids=lambda late_s: f"after {late_s * 1000:g} ms")
def test_a_start_whose_answer_was_not_heard_is_adopted_and_not_repeated(backend_kind: Told, late_s):
    """The server dies at some moment of the call, and the next one gives the same order."""
    proof = backend_kind.home.parent / "proof"

    async def story(bench: Bench) -> None:
        script = f"echo ran >> {proof}; echo ran" if bench.kind.shared else "echo ran"
        order = await bench.order(1, *sh(script))
        lost = asyncio.create_task(bench.backend.start([order]))
        await asyncio.wait({lost}, timeout=late_s)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        await bench.restart()
        for _ in range(100):
            with contextlib.suppress(BackendError):
                assert await bench.backend.start([order]) == {}
                break
            await asyncio.sleep(0.1)
        assert (await bench.end_of("1.0.1")).state == "succeeded"
        assert await bench.log_has("1.0.1", b"ran\n") == b"ran\n"
        assert list(await bench.backend.known()) == ["1.0.1"]
        if bench.kind.shared:
            assert proof.read_text() == "ran\n"

    backend_kind(story)


@kinds("commands")
def test_a_backend_that_was_closed_is_not_well_and_says_so_at_once(backend_kind: Told):
    async def story(bench: Bench) -> None:
        other = bench._again()
        health = await other.health()  # never opened
        assert not health.ok
        assert health.text
        await other.close()

    backend_kind(story)


# ---------------------------------------------------------------------------------------- secrets


@kinds("commands")
def test_a_secret_is_on_no_command_line_in_no_log_and_in_no_error(backend_kind: Told, caplog):
    """Every process of this machine is looked at while the run goes on; a system on another machine is not."""
    caplog.set_level(logging.DEBUG)
    secret = "hush-7d1c5a0e42-not-for-others"

    async def story(bench: Bench) -> None:
        env = {"API_TOKEN": secret, "db.password": secret} if bench.kind.name == "local" else {"API_TOKEN": secret}
        script = sh('test -n "$API_TOKEN" && echo ready; sleep 300')
        bad = await bench.order(2, "/bin/echo", "a\0b", env=env)
        answer = await bench.backend.start([await bench.order(1, *script, env=env), bad])
        said = "".join(f"{error.message}{error.hint}" for error in answer.values())
        for _ in range(20):
            assert secret not in await asyncio.to_thread(_command_lines)
            await asyncio.sleep(0.01)
        await bench.log_has("1.0.1", b"ready")
        assert secret not in await asyncio.to_thread(_command_lines)
        said += repr(await bench.backend.known()) + repr(await bench.backend.nodes())
        await bench.stop("1.0.1", grace_ms=0)
        said += repr(await bench.end_of("1.0.1"))
        assert secret not in said

    backend_kind(story)
    assert secret not in caplog.text


def _command_lines() -> str:
    out = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            out.append(path.read_bytes().decode(errors="replace"))
    return "\n".join(out)


# --------------------------------------------------------------------------- what only some can do


@kinds("commands", "execute")
def test_a_command_is_run_beside_a_run_and_no_shell_reads_its_words(backend_kind: Told):
    async def story(bench: Bench) -> None:
        await bench.backend.start([await bench.order(1, *sh("echo ready; sleep 300"), env={"MINE": "yes"})])
        await bench.log_has("1.0.1", b"ready")
        execute = bench.backend.execute
        show = sh('for word; do printf "[%s]" "$word"; done; exit 3')
        done = await execute("1.0.1", [*show, "sh", *HOSTILE], 10_000)
        assert (done.exit_code, done.stdout) == (3, "".join(f"[{word}]" for word in HOSTILE).encode())
        assert (await execute("1.0.1", sh('echo "$MINE"'), 10_000)).stdout == b"yes\n"
        assert (await execute("1.0.1", ["/bin/sleep", "300"], 200)).exit_code is None
        both = await asyncio.gather(*(execute("1.0.1", ["/bin/echo", str(n)], 10_000) for n in range(4)))
        assert [one.stdout for one in both] == [b"0\n", b"1\n", b"2\n", b"3\n"]
        await bench.stop("1.0.1", grace_ms=0)
        await bench.end_of("1.0.1")
        for run in ("1.0.1", "99.0.1"):
            with pytest.raises(NotFound):
                await execute(run, ["/bin/true"], 10_000)
        assert await bench.log("1.0.1") == b"ready\n"

    backend_kind(story)


@kinds("usage")
def test_what_is_used_is_told_for_nodes_that_are_offered(backend_kind: Told):
    async def story(bench: Bench) -> None:
        usage = await bench.backend.usage()
        assert usage.keys() <= {node.name for node in await bench.backend.nodes()}
        assert all(amount >= 0 for node in usage.values() for amount in node.used.values())

    backend_kind(story)


@kinds("commands", "suspend")
def test_a_frozen_run_does_nothing_until_it_goes_on(backend_kind: Told):
    async def story(bench: Bench) -> None:
        script = "echo ready; n=0; while [ $n -lt 1000 ]; do n=$((n+1)); echo $n; sleep 0.05; done"
        await bench.backend.start([await bench.order(1, *sh(script))])
        await bench.log_has("1.0.1", b"ready")
        await bench.backend.suspend(["1.0.1", "99.0.1"])
        await bench.backend.suspend(["1.0.1"])
        before = await bench.log("1.0.1")
        await asyncio.sleep(0.5)
        assert len(await bench.log("1.0.1")) - len(before) < 20
        assert (await bench.backend.known())["1.0.1"].state not in RUN_ENDED
        await bench.backend.resume(["1.0.1", "99.0.1"])
        await bench.log_has("1.0.1", before.split(b"\n")[-2] + b"\n")
        await bench.stop("1.0.1", grace_ms=0)
        assert (await bench.end_of("1.0.1")).state == "stopped"

    backend_kind(story)


@kinds("commands", "reserve")
def test_room_is_set_aside_and_given_back_as_often_as_one_likes(backend_kind: Told):
    async def story(bench: Bench) -> None:
        orders = [await bench.order(1), await bench.order(2)]
        await bench.backend.reserve(orders)
        await bench.backend.reserve(orders)
        await bench.backend.unreserve(["2.0.1"])
        await bench.backend.unreserve(["2.0.1", "99.0.1"])
        assert await bench.backend.known() == {}
        assert (await bench.run(orders[0]))[0].state == "succeeded"

    backend_kind(story)


@kinds("expects")
def test_what_is_expected_to_begin_is_in_the_systems_line(backend_kind: Told):
    async def story(bench: Bench) -> None:
        assert (await bench.backend.expected()).keys() <= (await bench.backend.known()).keys()

    backend_kind(story)


# ------------------------------------------------------------------- what it says it can do, and what not


@kinds("commands")
def test_a_backend_takes_what_it_says_it_can_do_and_refuses_what_it_says_it_cannot(backend_kind: Told):
    """The filter `capabilities` goes by what a backend says. One that claims too much would fail jobs for good."""

    async def story(bench: Bench) -> None:
        cannot = unmet_by(bench.backend.capabilities)
        asked = {
            "bare": {"image": ""},
            "health_checks": {"health": HealthCheck(command=("/bin/true",))},
            "checkpoint": {"checkpoint": Checkpoint(signal="USR1")},
            "checkpoint_commands": {"checkpoint": Checkpoint(command=("/bin/true",))},
            "limits": {"limits": {"memory": 256 << 20}, "memory": "32Mi"},
            "idle_timeouts": {"workload": Interactive(600_000)},
        }
        jobs = {need: number for number, need in enumerate(asked, 1)}
        orders = [await bench.order(jobs[need], "/bin/true", **fields) for need, fields in asked.items()]
        orders = [order for order in orders if not set(needs_of(order.spec, order.task)) & set(cannot)]
        assert orders
        assert await bench.backend.start(orders) == {}
        for order in orders:
            end = await bench.end_of(order.run.id)
            assert (end.state, end.exit_code) == ("succeeded", 0), f"{order.run.id}: {end.reason}"
        never = {"images": {"image": "busybox:local"}, "health_checks": asked["health_checks"]}
        for number, (need, fields) in enumerate(never.items(), 20):
            if need in cannot:
                order = await bench.order(number, "/bin/true", **fields)
                answer = await bench.backend.start([order])
                assert isinstance(answer[order.run.id], BackendRefused)

    backend_kind(story)


@kinds("commands", "limits")
def test_a_run_that_wants_more_memory_than_its_limit_does_not_get_it(backend_kind: Told):
    greedy = sh("x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo ${#x}")

    async def story(bench: Bench) -> None:
        small = await bench.order(1, *greedy, memory="32Mi", limits={"memory": 64 << 20})
        large = await bench.order(2, *greedy, memory="32Mi", limits={"memory": 1 << 30})
        assert await bench.backend.start([small, large]) == {}
        assert (await bench.end_of("1.0.1")).state == "failed"
        end = await bench.end_of("2.0.1")
        assert (end.state, end.exit_code) == ("succeeded", 0), end.reason

    backend_kind(story)


@kinds("commands")
def test_an_operator_runs_a_command_on_a_node_where_the_backend_can(backend_kind: Told):
    async def story(bench: Bench) -> None:
        execute = bench.backend.execute_on
        (*_, node) = sorted(node.name for node in await bench.backend.nodes() if node.ready)
        if not bench.backend.capabilities.node_execute:
            with pytest.raises(Unsupported, match="cannot run a command on a node") as told:
                await execute(node, ["/bin/true"], 10_000)
            assert told.value.hint
            return
        show = sh('for word; do printf "[%s]" "$word"; done; echo oops >&2; exit 3')
        done = await execute(node, [*show, "sh", *HOSTILE], 20_000)
        assert (done.exit_code, done.stdout) == (3, "".join(f"[{word}]" for word in HOSTILE).encode())
        assert b"oops" in done.stderr
        assert (await execute(node, ["/bin/sleep", "300"], 500)).exit_code is None
        with pytest.raises(NotFound):
            await execute("no-such-node", ["/bin/true"], 10_000)

    backend_kind(story)
