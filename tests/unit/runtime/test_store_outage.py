"""A store that takes nothing: clients are told at once, the server says that it is not ready, and all goes on by itself."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager

import pytest

from builders import NOW_MS, a_job_spec
from hodei.model.audit import AuditEntry
from hodei.model.errors import Unavailable
from hodei.ports import JobQuery
from hodei.runtime.rights import CALLER, Caller
from unit.runtime.living import ObedientBackend, TalkingStore, a_service, alive, until


class FullStore(TalkingStore):
    """Takes nothing while it is `full`."""

    full = False
    tried = 0

    def commit(self, saves):
        if self.full:
            self.tried += 1
            raise Unavailable("the disk is full", hint="free some disk space")
        super().commit(saves)


@contextmanager
def a_client():
    """What is done inside is done on behalf of a client."""
    before = CALLER.set(Caller(AuditEntry(NOW_MS, "ada", "user", "jobs.submit")))
    try:
        yield
    finally:
        CALLER.reset(before)


async def _submit(service, key=""):
    with a_client():
        return await service.submit([a_job_spec("one", user="ada")], key=key, fingerprint="f")


@pytest.mark.parametrize("key", ["", "k"], ids=["without a key", "with a key"])
def test_a_client_is_told_at_once_and_its_request_is_carried_out_once(key):
    async def main():
        store = FullStore()
        async with alive(a_service(store, ObedientBackend())) as service:
            store.full = True
            with pytest.raises(Unavailable) as first:
                async with asyncio.timeout(2):
                    await _submit(service, key)
            assert first.value.code == "WRITE_PENDING"
            with pytest.raises(Unavailable) as second:  # by now it is known before
                async with asyncio.timeout(2):
                    await _submit(service, key)
            assert second.value.code == ("WRITE_PENDING" if key else "UNAVAILABLE")
            assert "the store is not writable" in service.not_ready_reason
            store.full = False
            await until(lambda: service.ready)
            if key:
                again = await _submit(service, key)
                assert again.repeated
                assert again.ids == (1,)
            assert [job.id for job in store.jobs(JobQuery()).jobs] == [1]

    asyncio.run(main())


def test_trouble_that_is_over_before_a_client_hears_of_it_is_no_answer():
    class SlowKeys(TalkingStore):
        looked_up = threading.Event()

        def key(self, key):
            assert self.looked_up.wait(30)
            return super().key(key)

    async def main():
        store = SlowKeys()
        async with alive(a_service(store, ObedientBackend())) as service:
            waiting = asyncio.create_task(_submit(service, "k"))
            await until(lambda: service.loop._store_failed is not None)
            service.loop._set_store_error(Unavailable("the disk is full"))
            service.loop._set_store_error(None)
            await asyncio.sleep(0)
            store.looked_up.set()
            assert (await waiting).ids == (1,)

    asyncio.run(main())


def test_a_client_that_comes_just_when_its_request_is_done_does_not_stop_the_server():
    async def main():
        async with alive(a_service(TalkingStore(), ObedientBackend())) as service:
            done = asyncio.create_task(asyncio.sleep(0))
            await done
            service._submissions["k"] = done
            asyncio.get_running_loop().call_soon(service._release_key, "k", done)
            # Without this the test would never end: the event loop would have no other turn.
            rescue = threading.Timer(5, service._submissions.clear)
            rescue.start()
            submitted = await _submit(service, "k")
            assert rescue.is_alive()
            rescue.cancel()
            assert submitted.ids == (1,)

    asyncio.run(main())


def test_a_server_with_nothing_to_write_notices_by_trying_and_recovers_without_being_asked():
    async def main():
        store = FullStore()
        async with alive(a_service(store, ObedientBackend())) as service:
            await service.check_ready()
            store.full, service.loop._written_s = True, 0.0
            with pytest.raises(Unavailable, match="the store is not writable") as error:
                await service.check_ready()
            assert (error.value.code, error.value.hint) == ("NOT_READY", "free some disk space")
            await until(lambda: store.tried > 2)
            store.full = False
            await until(lambda: service.ready)
            await service.check_ready()

    asyncio.run(main())


def test_what_is_done_for_no_client_waits_as_long_as_it_takes():
    async def main():
        store = FullStore()
        async with alive(a_service(store, ObedientBackend())) as service:
            store.full = True
            making = asyncio.create_task(service.submit([a_job_spec("one", user="ada")], key="k"))
            await until(lambda: store.tried > 1)
            assert not making.done()
            store.full = False
            assert (await making).ids == (1,)

    asyncio.run(main())
