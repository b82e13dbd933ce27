"""A store that is not writable: clients get an error at once, the server is not ready, and recovers by itself."""

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
from unit.runtime.harness import FakeBackend, RecordingStore, a_service, alive, until


class FullStore(RecordingStore):
    """Refuses every commit while it is `full`."""

    full = False
    tried = 0

    def commit(self, saves):
        if self.full:
            self.tried += 1
            raise Unavailable("the disk is full", hint="free some disk space")
        super().commit(saves)


@contextmanager
def a_client():
    """Calls inside are made on behalf of a client."""
    before = CALLER.set(Caller(AuditEntry(NOW_MS, "ada", "user", "jobs.submit")))
    try:
        yield
    finally:
        CALLER.reset(before)


async def _submit(service, key=""):
    with a_client():
        return await service.submit([a_job_spec("one", user="ada")], key=key, fingerprint="f")


@pytest.mark.parametrize("key", ["", "k"], ids=["without a key", "with a key"])
def test_a_client_gets_write_pending_and_its_request_is_carried_out_once(key):
    async def main():
        store = FullStore()
        async with alive(a_service(store, FakeBackend())) as service:
            store.full = True
            with pytest.raises(Unavailable) as first:
                async with asyncio.timeout(2):
                    await _submit(service, key)
            assert first.value.code == "WRITE_PENDING"
            with pytest.raises(Unavailable) as second:  # the outage is known by now
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


def test_an_outage_that_ends_at_once_is_not_reported_to_the_client():
    class SlowKeys(RecordingStore):
        looked_up = threading.Event()

        def key(self, key):
            assert self.looked_up.wait(30)
            return super().key(key)

    async def main():
        store = SlowKeys()
        async with alive(a_service(store, FakeBackend())) as service:
            waiting = asyncio.create_task(_submit(service, "k"))
            await until(lambda: service.loop._store_failed is not None)
            service.loop._set_store_error(Unavailable("the disk is full"))
            service.loop._set_store_error(None)
            await asyncio.sleep(0)
            store.looked_up.set()
            assert (await waiting).ids == (1,)

    asyncio.run(main())


def test_a_repeated_request_at_the_end_of_the_first_does_not_block_the_server():
    async def main():
        async with alive(a_service(RecordingStore(), FakeBackend())) as service:
            done = asyncio.create_task(asyncio.sleep(0))
            await done
            service._submissions["k"] = done
            asyncio.get_running_loop().call_soon(service._release_key, "k", done)
            # Without this a regression would block the event loop and the test forever.
            rescue = threading.Timer(5, service._submissions.clear)
            rescue.start()
            submitted = await _submit(service, "k")
            assert rescue.is_alive()
            rescue.cancel()
            assert submitted.ids == (1,)

    asyncio.run(main())


def test_an_idle_server_detects_a_store_outage_and_recovers():
    async def main():
        store = FullStore()
        async with alive(a_service(store, FakeBackend())) as service:
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


def test_internal_commits_wait_for_the_store():
    async def main():
        store = FullStore()
        async with alive(a_service(store, FakeBackend())) as service:
            store.full = True
            submitting = asyncio.create_task(service.submit([a_job_spec("one", user="ada")], key="k"))
            await until(lambda: store.tried > 1)
            assert not submitting.done()
            store.full = False
            assert (await submitting).ids == (1,)

    asyncio.run(main())
