"""Starts whose requests were only partly sent, with a fake API; a real one is in
tests/real/kubernetes/test_backend_unknown_outcome.py."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from agent_host import an_order
from hodei.backends.base import BackendContext
from hodei.backends.kubernetes import KubernetesBackend, Settings
from hodei.backends.kubernetes.pod_api import InDoubt
from hodei.model.effects import Start
from hodei.model.errors import NOT_REACHED, BackendError


class Clock:
    def now_ms(self) -> int:
        return 1000


class FakeApi:
    """Answers by the number of the job."""

    def __init__(self, **answers: Exception | None) -> None:
        self.answers = answers

    async def create(self, body: dict[str, Any]) -> None:
        answer = self.answers[f"job{body['metadata']['labels']['hodei.io/job']}"]
        await asyncio.sleep(0)
        if answer is not None:
            raise answer


def placed(order: Start) -> Start:
    return structs.replace(order, run=structs.replace(order.run, placed_ms=2000))


REFUSED = InDoubt(BackendError("connection refused", code=NOT_REACHED))
CUT = InDoubt(BackendError("no answer"))


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        pytest.param({"job1": REFUSED, "job2": REFUSED}, NOT_REACHED, id="nothing was sent"),
        pytest.param({"job1": REFUSED, "job2": CUT}, "BACKEND_ERROR", id="one was sent"),
        pytest.param({"job1": CUT, "job2": REFUSED}, "BACKEND_ERROR", id="one was sent first"),
        pytest.param({"job1": None, "job2": REFUSED}, "BACKEND_ERROR", id="one was created"),
    ],
)
def test_a_start_is_not_reached_only_if_no_request_was_sent(tmp_path: Path, answers, code):
    async def scenario() -> None:
        backend = KubernetesBackend("prod", Settings(image="busybox"), BackendContext("test", 1, tmp_path, Clock()))
        backend._pods = FakeApi(**answers)  # type: ignore[assignment]
        with pytest.raises(BackendError) as failure:
            await backend.start([placed(an_order(1)), placed(an_order(2))])
        assert failure.value.code == code

    asyncio.run(scenario())
