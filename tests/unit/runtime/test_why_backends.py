"""What `why` says about backends: starts in doubt, and the hints of refusals."""

from __future__ import annotations

import asyncio

import pytest

from builders import a_job_spec
from hodei.model.errors import IN_DOUBT, BackendError, BackendRefused
from hodei.runtime import binder
from unit.runtime.harness import FakeBackend, FakeClock, RecordingStore, a_service, alive, until


def test_a_start_without_an_answer_is_shown_as_in_doubt(monkeypatch):
    monkeypatch.setattr(binder, "DOUBT_PAUSE_S", 0.01)

    async def main():
        clock, backend = FakeClock(), FakeBackend()
        backend.refuse = {"1.0.1": BackendError("no answer", code=IN_DOUBT)}
        async with alive(a_service(RecordingStore(), backend, clock=clock)) as service:
            await service.submit([a_job_spec()])
            assert (await service.why(1)).code == "PLACED"
            await until(lambda: service.backend_manager.binder.is_in_doubt("1.0.1"))
            clock.ms += 3000
            answer = await service.why(1)
            assert (answer.code, answer.status) == ("START_IN_DOUBT", "placed")
            assert "backend fake has not answered yet" in answer.summary
            backend.refuse = {}
            await until(lambda: not service.backend_manager.binder.is_in_doubt("1.0.1"))
            assert (await service.why(1)).code == "PLACED"

    asyncio.run(main())


@pytest.mark.parametrize(("error", "code"), [(BackendRefused, "BACKEND_REFUSED"), (BackendError, "START_FAILED")])
def test_a_refusal_keeps_its_hint(error, code):
    async def main():
        backend = FakeBackend()
        backend.refuse = {"1.0.1": error("no such image", hint="docker pull it")}
        async with alive(a_service(RecordingStore(), backend)) as service:
            await service.submit([a_job_spec()])
            await until(lambda: service.store.job(1).reason_code == code)
            assert service.store.job(1).reason == "no such image; docker pull it"
            assert "docker pull it" in (await service.why(1)).summary

    asyncio.run(main())
