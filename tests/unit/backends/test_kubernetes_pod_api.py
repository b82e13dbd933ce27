"""Refusals of the API: permanent, temporary or in doubt; and no flood of requests to an API that does not answer."""

from __future__ import annotations

import asyncio

import pytest

from hodei.backends.kubernetes.pod_api import InDoubt, classify_refusal, run_limited
from hodei.kube.api.client import ApiError
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused


@pytest.mark.parametrize(
    ("status", "said", "kind"),
    [
        pytest.param(422, "Invalid value", BackendRefused, id="not a pod"),
        pytest.param(400, "cannot be handled as a Pod", BackendRefused, id="not even an object"),
        pytest.param(413, "Request entity too large", BackendRefused, id="too large"),
        pytest.param(500, "etcdserver: request is too large", BackendRefused, id="too large for etcd"),
        pytest.param(403, 'violates PodSecurity "restricted:latest"', BackendRefused, id="against the rules"),
        pytest.param(403, "maximum cpu usage per Container is 1", BackendRefused, id="over a limit range"),
        pytest.param(403, "exceeded quota: small", BackendError, id="a full quota"),
        pytest.param(403, 'User "x" cannot create resource "pods"', BackendError, id="a right that is missing"),
        pytest.param(403, "forbidden because it is being terminated", BackendError, id="a namespace that goes"),
        pytest.param(404, 'namespaces "x" not found', BackendError, id="no such namespace"),
        pytest.param(401, "Unauthorized", BackendError, id="a token that ran out"),
        pytest.param(429, "too many requests", BackendError, id="too many at once"),
        pytest.param(504, "Timeout", InDoubt, id="not done in time, perhaps"),
        pytest.param(500, "etcdserver: request timed out", InDoubt, id="etcd did not answer in time"),
    ],
)
def test_a_refusal_is_permanent_temporary_or_in_doubt(status, said, kind):
    assert type(classify_refusal(ApiError(status, "", said))) is kind


def test_a_request_is_not_reached_only_if_it_was_not_sent():
    sent = classify_refusal(ApiError(0, "Unreached", "no answer. It may or may not have been carried out."))
    unsent = classify_refusal(ApiError(0, "Unreached", "Name or service not known.", sent=False))
    assert isinstance(sent, InDoubt)
    assert isinstance(unsent, InDoubt)
    assert (sent.error.code, unsent.error.code) == ("BACKEND_ERROR", NOT_REACHED)


def test_no_work_is_begun_after_the_first_failure():
    begun: list[int] = []

    async def work(number: int) -> None:
        begun.append(number)
        await asyncio.sleep(0)
        raise BackendError("gone")

    with pytest.raises(BackendError):
        asyncio.run(run_limited(range(1000), work))
    assert len(begun) <= 32
