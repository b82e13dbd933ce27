"""Refusals of the API: permanent, temporary or in doubt; and few requests to an API that does not answer."""

from __future__ import annotations

import asyncio

import pytest

from hodei.backends.kubernetes.pod_api import InDoubt, classify_refusal, run_limited
from hodei.kube.api.client import ApiError
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        pytest.param(422, "Invalid value", BackendRefused, id="an invalid pod"),
        pytest.param(400, "cannot be handled as a Pod", BackendRefused, id="an invalid object"),
        pytest.param(413, "Request entity too large", BackendRefused, id="too large"),
        pytest.param(500, "etcdserver: request is too large", BackendRefused, id="too large for etcd"),
        pytest.param(403, 'violates PodSecurity "restricted:latest"', BackendRefused, id="against pod security"),
        pytest.param(403, "maximum cpu usage per Container is 1", BackendRefused, id="over a limit range"),
        pytest.param(403, "exceeded quota: small", BackendError, id="a full quota"),
        pytest.param(403, 'User "x" cannot create resource "pods"', BackendError, id="a missing right"),
        pytest.param(403, "forbidden because it is being terminated", BackendError, id="a terminating namespace"),
        pytest.param(404, 'namespaces "x" not found', BackendError, id="no such namespace"),
        pytest.param(401, "Unauthorized", BackendError, id="an expired token"),
        pytest.param(429, "too many requests", BackendError, id="too many requests"),
        pytest.param(504, "Timeout", InDoubt, id="a timeout"),
        pytest.param(500, "etcdserver: request timed out", InDoubt, id="a timeout of etcd"),
    ],
)
def test_a_refusal_is_permanent_temporary_or_in_doubt(status, message, kind):
    assert type(classify_refusal(ApiError(status, "", message))) is kind


def test_a_request_is_not_reached_only_if_it_was_not_sent():
    sent = classify_refusal(ApiError(0, "Unreached", "no answer. It may or may not have been carried out."))
    unsent = classify_refusal(ApiError(0, "Unreached", "Name or service not known.", sent=False))
    assert isinstance(sent, InDoubt)
    assert isinstance(unsent, InDoubt)
    assert (sent.error.code, unsent.error.code) == ("BACKEND_ERROR", NOT_REACHED)


def test_no_request_is_started_after_the_first_failure():
    started: list[int] = []

    async def work(number: int) -> None:
        started.append(number)
        await asyncio.sleep(0)
        raise BackendError("unreachable")

    with pytest.raises(BackendError):
        asyncio.run(run_limited(range(1000), work))
    assert len(started) <= 32
