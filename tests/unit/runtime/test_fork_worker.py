"""Queries in a forked child, and queries that do not block the loop."""

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
from hodei.runtime import fork_worker
from hodei.runtime.fork_worker import ForkWorker, QueryQueue
from hodei.store.memory import MemoryStore
from unit.runtime.harness import FakeBackend, a_service, alive, until


def test_a_child_sees_the_state_at_the_fork_and_changes_nothing():
    async def main():
        worker, state = ForkWorker(1), {"number": 1}

        def work():
            time.sleep(0.05)
            state["number"] += 41
            return state, os.getpid()

        query = asyncio.create_task(worker.run(work))
        await until(lambda: worker._children)
        state["number"] = 7
        seen, pid = await query
        assert seen == {"number": 42}
        assert pid != os.getpid()
        assert state == {"number": 7}
        worker.close()

    asyncio.run(main())


def test_an_error_in_a_child_keeps_its_hint_and_code():
    def refuse():
        raise InvalidInput("not so", hint="so", code="ODD", problems=(("a", "b"),))

    async def main():
        worker = ForkWorker(1)
        with pytest.raises(InvalidInput) as refused:
            await worker.run(refuse)
        assert (refused.value.message, refused.value.hint, refused.value.code) == ("not so", "so", "ODD")
        assert refused.value.problems == (("a", "b"),)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            await worker.run(lambda: 1 / 0)
        worker.close()

    asyncio.run(main())


def test_equal_pending_queries_share_one_child():
    async def main():
        worker = ForkWorker(1)
        first = asyncio.create_task(worker.run(lambda: time.sleep(0.1)))
        await until(lambda: worker._children)
        pids = await asyncio.gather(*(worker.run(os.getpid, "same") for _ in range(8)), worker.run(os.getpid, "other"))
        assert len(set(pids)) == 2
        assert os.getpid() not in pids
        await first
        assert await worker.run(os.getpid, "same") not in pids, "an answer was cached"
        worker.close()

    asyncio.run(main())


def test_a_cancelled_caller_does_not_cancel_a_shared_query():
    async def main():
        worker = ForkWorker(1)
        busy = asyncio.create_task(worker.run(lambda: time.sleep(0.1)))
        await until(lambda: worker._children)
        one, other = (asyncio.create_task(worker.run(lambda: 5, "same")) for _ in range(2))
        await asyncio.sleep(0)
        one.cancel()
        assert await other == 5
        await busy
        worker.close()

    asyncio.run(main())


@pytest.mark.parametrize("end", ["killed", "too long"])
def test_a_child_that_does_not_finish_is_an_error(end):
    async def main():
        worker = ForkWorker(1, limit_s=0.05 if end == "too long" else 60)
        query = asyncio.create_task(worker.run(lambda: time.sleep(60)))
        await until(lambda: worker._children)
        if end == "killed":
            os.kill(next(iter(worker._children)), signal.SIGKILL)
        with pytest.raises(Unavailable, match="took too long" if end == "too long" else "was killed"):
            await query
        assert await worker.run(lambda: 5) == 5, "its slot is not free"
        worker.close()

    asyncio.run(main())


def test_close_kills_the_children():
    async def main():
        worker = ForkWorker(1)
        query = asyncio.create_task(worker.run(lambda: time.sleep(60)))
        await until(lambda: worker._children)
        (child,) = worker._children
        await asyncio.to_thread(worker.close)
        with pytest.raises(Unavailable):
            await query
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
        with pytest.raises(Unavailable):
            await worker.run(lambda: 5)

    asyncio.run(main())


def test_a_connection_that_is_closed_here_does_not_stay_open_in_a_child():
    async def main():
        worker, (parent_end, far_end) = ForkWorker(1), socket.socketpair()
        query = asyncio.create_task(worker.run(lambda: time.sleep(60)))
        await until(lambda: worker._children)
        parent_end.close()
        far_end.settimeout(20)
        assert await asyncio.to_thread(far_end.recv, 1) == b""
        far_end.close()
        assert not query.done()
        await asyncio.to_thread(worker.close)
        with pytest.raises(Unavailable):
            await query

    asyncio.run(main())


def test_no_copy_of_the_controller_is_made_on_the_loop(tmp_path, monkeypatch):
    copies, copy = tmp_path / "copies", clone._Copier.copy

    def recorded(self, it):
        with copies.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return copy(self, it)

    async def main():
        async with alive(a_service(MemoryStore(), FakeBackend())) as service:
            await service.submit([a_job_spec(cpu="4", estimate_ms=60_000) for _ in range(3)])
            monkeypatch.setattr(clone._Copier, "copy", recorded)
            answer = await service.what_if(Question(add_nodes=1))
            assert len(answer.sooner) == 2
            await service.forecasts._forecast({})
            with pytest.raises(NotFound):
                await service.what_if(Question(remove_nodes=("nowhere",)))
            assert str(os.getpid()) not in copies.read_text().split()

    asyncio.run(main())


def test_equal_pending_queries_run_once():
    async def main():
        answers, queries = QueryQueue(), []

        def answer(what):
            queries.append(what)
            return what

        results = await asyncio.gather(*(answers.run(what, lambda what=what: answer(what)) for what in "aabbaab"))
        assert results == list("aabbaab")
        assert queries == ["a", "b"]
        await answers.run("a", lambda: answer("a"))
        assert queries == ["a", "b", "a"], "an answer was cached"

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
    spent, pauses, sleep = [0.0], [], asyncio.sleep

    async def pause(seconds):
        pauses.append(seconds)
        await sleep(0)

    class _Asyncio:
        def __getattr__(self, name):
            return pause if name == "sleep" else getattr(asyncio, name)

    def answer(seconds):
        spent[0] += seconds

    monkeypatch.setattr(fork_worker.time, "thread_time", lambda: spent[0])
    monkeypatch.setattr(fork_worker, "asyncio", _Asyncio())

    async def main():
        answers = QueryQueue()
        await asyncio.gather(*(answers.run(s, lambda s=s: answer(s)) for s in (0.25, 0.0001, 0.5)))
        await sleep(0.01)

    asyncio.run(main())
    assert pauses == [0.25, 0, 0.5]


def test_eight_why_queries_for_one_job_cost_one_answer(monkeypatch):
    from hodei.runtime import service as services

    queries, why = [], services.explain.why

    def recorded(controller, job, now_ms):
        queries.append(job)
        return why(controller, job, now_ms)

    async def main():
        async with alive(a_service(MemoryStore(), FakeBackend())) as service:
            await service.submit([a_job_spec(cpu="4") for _ in range(3)])
            monkeypatch.setattr(services.explain, "why", recorded)
            answers = await asyncio.gather(*(service.why(3) for _ in range(8)), service.why(2))
            assert [answer.queue.position for answer in answers] == [2] * 8 + [1]
            assert sorted(queries) == [2, 3]
            priorities = await asyncio.gather(*(service.priority(3) for _ in range(8)))
            assert {priority.position for priority in priorities} == {2}
            assert await service.priority(1) is None

    asyncio.run(main())
