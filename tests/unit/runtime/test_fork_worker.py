"""Queries in a forked child, and queries that leave time for the loop."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time

import pytest

from builders import a_job_spec
from hodei.control import clone
from hodei.control.explain.whatif import Question
from hodei.model.errors import InvalidInput, NotFound, Unavailable
from hodei.runtime import fork_worker as answering
from hodei.runtime.fork_worker import ForkWorker, QueryQueue
from hodei.store.memory import MemoryStore
from unit.runtime.harness import FakeBackend, a_service, alive, until


def test_a_child_sees_the_state_at_the_fork_and_changes_nothing():
    async def main():
        aside, state = ForkWorker(1), {"number": 1}

        def work():
            time.sleep(0.05)
            state["number"] += 41
            return state, os.getpid()

        asked = asyncio.create_task(aside.run(work))
        await until(lambda: aside._children)
        state["number"] = 7
        seen, pid = await asked
        assert seen == {"number": 42}
        assert pid != os.getpid()
        assert state == {"number": 7}
        aside.close()

    asyncio.run(main())


def test_an_error_in_a_child_keeps_its_hint_and_code():
    def refuse():
        raise InvalidInput("not so", hint="so", code="ODD", problems=(("a", "b"),))

    async def main():
        aside = ForkWorker(1)
        with pytest.raises(InvalidInput) as refused:
            await aside.run(refuse)
        assert (refused.value.message, refused.value.hint, refused.value.code) == ("not so", "so", "ODD")
        assert refused.value.problems == (("a", "b"),)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            await aside.run(lambda: 1 / 0)
        aside.close()

    asyncio.run(main())


def test_equal_queries_that_wait_share_one_child():
    async def main():
        aside = ForkWorker(1)
        first = asyncio.create_task(aside.run(lambda: time.sleep(0.1)))
        await until(lambda: aside._children)
        pids = await asyncio.gather(*(aside.run(os.getpid, "same") for _ in range(8)), aside.run(os.getpid, "other"))
        assert len(set(pids)) == 2
        assert os.getpid() not in pids
        await first
        assert await aside.run(os.getpid, "same") not in pids, "an answer is not kept"
        aside.close()

    asyncio.run(main())


def test_a_cancelled_caller_leaves_the_answer_to_the_others():
    async def main():
        aside = ForkWorker(1)
        busy = asyncio.create_task(aside.run(lambda: time.sleep(0.1)))
        await until(lambda: aside._children)
        one, other = (asyncio.create_task(aside.run(lambda: 5, "same")) for _ in range(2))
        await asyncio.sleep(0)
        one.cancel()
        assert await other == 5
        await busy
        aside.close()

    asyncio.run(main())


@pytest.mark.parametrize("end", ["killed", "too long"])
def test_a_child_that_does_not_finish_is_an_error(end):
    async def main():
        aside = ForkWorker(1, limit_s=0.05 if end == "too long" else 60)
        asked = asyncio.create_task(aside.run(lambda: time.sleep(60)))
        await until(lambda: aside._children)
        if end == "killed":
            os.kill(next(iter(aside._children)), signal.SIGKILL)
        with pytest.raises(Unavailable, match="took too long" if end == "too long" else "was killed"):
            await asked
        assert await aside.run(lambda: 5) == 5, "its place is free again"
        aside.close()

    asyncio.run(main())


def test_close_kills_the_children():
    async def main():
        aside = ForkWorker(1)
        asked = asyncio.create_task(aside.run(lambda: time.sleep(60)))
        await until(lambda: aside._children)
        (child,) = aside._children
        await asyncio.to_thread(aside.close)
        with pytest.raises(Unavailable):
            await asked
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
        with pytest.raises(Unavailable):
            await aside.run(lambda: 5)

    asyncio.run(main())


def test_a_connection_that_is_closed_here_does_not_stay_open_in_a_child():
    async def main():
        aside, (ours, theirs) = ForkWorker(1), socket.socketpair()
        asked = asyncio.create_task(aside.run(lambda: time.sleep(60)))
        await until(lambda: aside._children)
        ours.close()
        theirs.settimeout(20)
        assert await asyncio.to_thread(theirs.recv, 1) == b""
        theirs.close()
        assert not asked.done()
        await asyncio.to_thread(aside.close)
        with pytest.raises(Unavailable):
            await asked

    asyncio.run(main())


def test_no_copy_of_the_controller_is_made_on_the_loop(tmp_path, monkeypatch):
    made, copy = tmp_path / "made", clone._Copier.copy

    def noted(self, it):
        with made.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return copy(self, it)

    async def main():
        async with alive(a_service(MemoryStore(), FakeBackend())) as service:
            await service.submit([a_job_spec(cpu="4", estimate_ms=60_000) for _ in range(3)])
            monkeypatch.setattr(clone._Copier, "copy", noted)
            answer = await service.what_if(Question(add_nodes=1))
            assert len(answer.sooner) == 2
            await service.forecasts._forecast()
            with pytest.raises(NotFound):
                await service.what_if(Question(remove_nodes=("nowhere",)))
            assert str(os.getpid()) not in made.read_text().split()

    asyncio.run(main())


def test_equal_queries_that_wait_run_once():
    async def main():
        answers, asked = QueryQueue(), []

        def answer(what):
            asked.append(what)
            return what

        got = await asyncio.gather(*(answers.run(what, lambda what=what: answer(what)) for what in "aabbaab"))
        assert got == list("aabbaab")
        assert asked == ["a", "b"]
        await answers.run("a", lambda: answer("a"))
        assert asked == ["a", "b", "a"], "an answer is not kept"

    asyncio.run(main())


def test_a_failed_query_fails_only_its_callers():
    async def main():
        answers = QueryQueue()
        one, two = await asyncio.gather(
            answers.run("a", lambda: 1 / 0), answers.run("b", lambda: 5), return_exceptions=True
        )
        assert isinstance(one, ZeroDivisionError)
        assert two == 5

    asyncio.run(main())


def test_the_queue_pauses_as_long_as_each_query_took(monkeypatch):
    spent, rests, sleep = [0.0], [], asyncio.sleep

    async def rest(seconds):
        rests.append(seconds)
        await sleep(0)

    class _Asyncio:
        def __getattr__(self, name):
            return rest if name == "sleep" else getattr(asyncio, name)

    def answer(seconds):
        spent[0] += seconds

    monkeypatch.setattr(answering.time, "thread_time", lambda: spent[0])
    monkeypatch.setattr(answering, "asyncio", _Asyncio())

    async def main():
        answers = QueryQueue()
        await asyncio.gather(*(answers.run(s, lambda s=s: answer(s)) for s in (0.25, 0.0001, 0.5)))
        await sleep(0.01)

    asyncio.run(main())
    assert rests == [0.25, 0, 0.5]


def test_eight_why_queries_for_one_job_cost_one_answer(monkeypatch):
    from hodei.runtime import service as services

    asked, why = [], services.explain.why

    def noted(controller, job, now_ms):
        asked.append(job)
        return why(controller, job, now_ms)

    async def main():
        async with alive(a_service(MemoryStore(), FakeBackend())) as service:
            await service.submit([a_job_spec(cpu="4") for _ in range(3)])
            monkeypatch.setattr(services.explain, "why", noted)
            told = await asyncio.gather(*(service.why(3) for _ in range(8)), service.why(2))
            assert [answer.queue.position for answer in told] == [2] * 8 + [1]
            assert sorted(asked) == [2, 3]
            places = await asyncio.gather(*(service.priority(3) for _ in range(8)))
            assert {place.position for place in places} == {2}
            assert await service.priority(1) is None

    asyncio.run(main())
