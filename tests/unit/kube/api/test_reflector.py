"""The reflector against a scripted API: the test defines each list and each watch.

It does not prove that a real API server sends such responses; tests/real/kubernetes does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest

from hodei.kube.api.client import ApiError
from hodei.kube.api.objects import Pod
from hodei.kube.api.reflector import Change, Reflector, Resource

PODS = Resource("/api/v1/pods", Pod)


class ScriptEnded(BaseException):
    """The script has ended. A BaseException, because a reflector continues after exceptions."""


class ScriptedApi:
    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.requests: list[dict[str, str]] = []
        self.idle_timeout_s: list[float] = []

    def _next(self, params: Mapping[str, str] | None) -> Any:
        if not self.answers:
            raise ScriptEnded
        self.requests.append(dict(params or {}))
        return self.answers.pop(0)

    async def request(
        self, method: str, path: str, *, params: Mapping[str, str] | None = None, timeout_s: float
    ) -> bytes:
        response = self._next(params)
        if isinstance(response, ApiError):
            raise response
        return bytes(response)

    async def stream(
        self, path: str, params: Mapping[str, str], *, idle_timeout_s: float
    ) -> AsyncGenerator[list[bytes], None]:
        self.idle_timeout_s.append(idle_timeout_s)
        response = self._next(params)
        if isinstance(response, ApiError):
            raise response
        for batch in response:
            if isinstance(batch, ApiError):
                raise batch
            yield batch


class RecordingSink:
    def __init__(self) -> None:
        self.pods: dict[str, str] = {}
        self.calls: list[str] = []

    def listed(self, objects: list[Pod]) -> None:
        self.pods = {pod.metadata.name: pod.metadata.resource_version for pod in objects}
        self.calls.append("listed " + " ".join(self.pods))

    def changed(self, kind: Change, object: Pod) -> None:
        self.calls.append(f"{kind} {object.metadata.name}")
        if kind == "DELETED":
            self.pods.pop(object.metadata.name)
        else:
            self.pods[object.metadata.name] = object.metadata.resource_version

    def flushed(self) -> None:
        self.calls.append("flushed")


def pod(name: str, version: int, **more: Any) -> dict[str, Any]:
    return {"kind": "Pod", "metadata": {"name": name, "resourceVersion": str(version)}, **more}


def page(version: int, *pods: dict[str, Any], next: str = "") -> bytes:
    meta = {"resourceVersion": str(version), **({"continue": next} if next else {})}
    return json.dumps({"kind": "PodList", "metadata": meta, "items": list(pods)}).encode()


def event(kind: str, object: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": object}).encode()


def bookmark(version: int) -> bytes:
    return event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(version), "creationTimestamp": None},
                              "spec": {"containers": None}, "status": {}})  # fmt: skip


def expired() -> ApiError:
    return ApiError(410, "Expired", "too old resource version")


class ReflectorRun:
    """Runs the script to its end."""

    def __init__(self, *answers: Any, sink: RecordingSink | None = None, **options: Any) -> None:
        self.api = ScriptedApi(*answers)
        self.sink = sink or RecordingSink()
        self.synced: list[bool] = []
        self.pauses: list[float] = []
        self.now = 0.0
        self.problems: list[str] = []
        asyncio.run(self._run(options))

    async def _run(self, options: dict[str, Any]) -> None:
        async def sleep(seconds: float) -> None:
            self.pauses.append(seconds)
            self.problems.append(self.reflector.problem)
            self.synced.append(self.reflector.synced.is_set())
            self.now += seconds

        self.reflector = Reflector(
            self.api,  # type: ignore[arg-type]
            PODS, self.sink, monotonic=lambda: self.now, sleep=sleep, random_fraction=lambda: 1.0, **options,
        )  # fmt: skip
        with pytest.raises(ScriptEnded):
            await self.reflector.run()

    @property
    def lists(self) -> list[dict[str, str]]:
        return [params for params in self.api.requests if "watch" not in params]

    @property
    def watched_from(self) -> list[str]:
        return [params["resourceVersion"] for params in self.api.requests if "watch" in params]


def test_the_list_is_followed_by_changes_in_order_and_one_flush_per_batch():
    run = ReflectorRun(
        page(10, pod("a", 3), pod("b", 4)),
        [[event("ADDED", pod("c", 11)), event("MODIFIED", pod("a", 12))], [event("DELETED", pod("b", 13))]],
    )
    assert run.sink.calls == [
        "listed a b", "flushed", "ADDED c", "MODIFIED a", "flushed", "DELETED b", "flushed",
    ]  # fmt: skip
    assert run.sink.pods == {"a": "12", "c": "11"}
    assert run.reflector.synced.is_set()


def test_the_first_list_is_from_memory_with_a_limit_and_the_selectors_go_everywhere():
    selector = {"fieldSelector": "spec.nodeName="}
    run = ReflectorRun(page(10), [[]], selector=selector)
    assert run.api.requests[0] == {"fieldSelector": "spec.nodeName=", "limit": "2000", "resourceVersion": "0"}
    assert run.api.requests[1] == {
        "fieldSelector": "spec.nodeName=", "watch": "true", "allowWatchBookmarks": "true", "resourceVersion": "10",
        "timeoutSeconds": "319",
    }  # fmt: skip


def test_a_long_list_is_paged_and_delivered_as_one():
    run = ReflectorRun(
        page(10, pod("a", 1), next="more"), page(10, pod("b", 2), next="still"), page(10, pod("c", 3)), [[]]
    )
    assert run.sink.calls[0] == "listed a b c"
    assert [params.get("continue") for params in run.lists] == [None, "more", "still"]
    assert "resourceVersion" not in run.lists[1]


def test_expired_pages_are_listed_again_without_paging():
    run = ReflectorRun(page(10, pod("a", 1), next="more"), expired(), page(12, pod("a", 1), pod("b", 2)), [[]])
    assert "limit" not in run.lists[2]
    assert run.sink.calls[0] == "listed a b", "an incomplete list was delivered"


def test_a_watch_that_ends_is_resumed_from_the_last_change():
    run = ReflectorRun(page(10), [[event("ADDED", pod("a", 11))]], [[event("ADDED", pod("b", 12))]], [[]])
    assert run.watched_from == ["10", "11", "12"]
    assert len(run.lists) == 1


def test_a_watch_that_is_cut_resumes_from_the_last_bookmark_without_repeats():
    cut = ApiError(0, "Unreached", "the connection broke")
    run = ReflectorRun(
        page(10), [[event("ADDED", pod("a", 11))], [bookmark(50)], cut], [[event("MODIFIED", pod("a", 51))]]
    )
    assert run.watched_from == ["10", "50"]
    assert run.sink.calls == ["listed ", "flushed", "ADDED a", "flushed", "flushed", "MODIFIED a", "flushed"]


@pytest.mark.parametrize(
    "expiry",
    [
        pytest.param(expired(), id="as an answer"),
        pytest.param([[event("ERROR", {"kind": "Status", "status": "Failure", "code": 410, "reason": "Expired"})]],
                     id="as an event"),
        pytest.param([[event("ADDED", pod("x", 11)), event("ERROR", {"kind": "Status", "status": "Failure", "code": 410})]],
                     id="as an event after others"),
    ],
)  # fmt: skip
def test_an_expired_version_causes_a_new_list(expiry: Any):
    run = ReflectorRun(page(10, pod("a", 3)), expiry, page(90, pod("b", 80)), [[]])
    assert [params.get("resourceVersion") for params in run.lists] == ["0", None], "never back in time"
    assert "listed b" in run.sink.calls
    assert run.sink.pods == {"b": "80"}
    assert run.watched_from[-1] == "90"


@pytest.mark.parametrize("line", [b"{garbage", b"[]", b'{"type":"ODD","object":{"metadata":{}}}', b'{"object":1}'])
def test_an_undecodable_line_causes_a_new_list(line: bytes):
    run = ReflectorRun(
        page(10), [[event("ADDED", pod("a", 11)), line, event("ADDED", pod("b", 12))]], page(13, pod("b", 12)), [[]]
    )
    assert run.sink.calls[:5] == ["listed ", "flushed", "ADDED a", "flushed", "listed b"]


def test_another_error_event_is_reported_and_causes_a_new_list():
    failure = event("ERROR", {"kind": "Status", "status": "Failure", "code": 500, "message": "etcd is on fire"})
    run = ReflectorRun(page(10), [[failure]], page(20, pod("a", 15)), [[]])
    assert "etcd is on fire" in run.problems[0]
    assert run.sink.pods == {"a": "15"}
    assert run.reflector.problem == ""


def test_null_lists_are_read_and_empty_lines_are_skipped():
    odd = pod("a", 11, spec={"containers": None, "tolerations": None})
    run = ReflectorRun(
        page(10, pod("b", 3, spec={"containers": None})), [[event("ADDED", odd), b"", bookmark(12)]], [[]]
    )
    assert run.sink.pods == {"a": "11", "b": "3"}
    assert run.watched_from == ["10", "12"]


def test_an_undecodable_object_is_ignored_and_counted(caplog: pytest.LogCaptureFixture):
    odd = pod("odd", 4, spec={"containers": 7})
    run = ReflectorRun(page(10, pod("a", 3), odd), [[event("ADDED", odd), event("ADDED", pod("b", 12))]], [[]])
    assert sorted(run.sink.pods) == ["a", "b"]
    assert run.reflector.undecodable == 2
    assert "is ignored" in caplog.text


def test_a_collection_that_is_not_installed_is_empty_and_tried_every_minute():
    absent = ApiError(404, "NotFound", "the server could not find the requested resource")
    run = ReflectorRun(absent, absent, page(10, pod("a", 3)), [[]])
    assert run.sink.calls[:4] == ["listed ", "flushed", "listed ", "flushed"]
    assert run.pauses[:2] == [pytest.approx(66.0)] * 2
    assert run.problems[0] == ""
    assert run.sink.pods == {"a": "3"}


def test_a_collection_that_is_uninstalled_becomes_empty():
    absent = ApiError(404, "NotFound", "not there")
    run = ReflectorRun(page(10, pod("a", 3)), absent, absent)
    assert run.sink.pods == {}


def test_a_forbidden_collection_is_logged_once_a_minute_and_not_synced(caplog: pytest.LogCaptureFixture):
    forbidden = ApiError(403, "Forbidden", "pods is forbidden", hint="Grant it.")
    run = ReflectorRun(*[forbidden] * 8)
    assert run.problems == ["pods is forbidden Grant it."] * 8
    assert run.pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]  # it may be for a moment only
    assert len(caplog.records) == 2
    assert not run.reflector.synced.is_set()
    assert run.sink.calls == []


def test_an_undecodable_list_is_reported_and_requested_again():
    run = ReflectorRun(b"<html>login</html>", page(10, pod("a", 3)), [[]])
    assert "The list of /api/v1/pods cannot be decoded" in run.problems[0]
    assert run.sink.pods == {"a": "3"}


def test_pauses_grow_to_half_a_minute_while_the_api_is_down():
    unreached = ApiError(0, "Unreached", "refused")
    run = ReflectorRun(*[unreached] * 9)
    assert run.pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]


def test_a_watch_that_ends_as_soon_as_it_begins_is_not_repeated_at_full_speed():
    run = ReflectorRun(page(10), [], [], [])
    assert run.pauses == [1.0, 2.0, 4.0]
    assert len(run.lists) == 1


def test_a_silent_watch_times_out_after_at_most_twice_its_length():
    assert ReflectorRun(page(10), [[]]).api.idle_timeout_s[0] == 150.0
    assert ReflectorRun(page(10), [[]], watch_s=20).api.idle_timeout_s[0] == 44.0


def test_other_tasks_run_while_a_big_list_is_decoded():
    async def decode() -> int:
        rounds = 0

        async def other() -> None:
            nonlocal rounds
            while True:
                rounds += 1
                await asyncio.sleep(0)

        api = ScriptedApi(page(10, *(pod(f"p{n}", n) for n in range(3000))))
        task = asyncio.create_task(other())
        with pytest.raises(ScriptEnded):
            await Reflector(api, PODS, RecordingSink()).run()  # type: ignore[arg-type]
        task.cancel()
        return rounds

    assert asyncio.run(decode()) >= 6


DEEP = '{"a":' * 5000 + "1" + "}" * 5000


class UnreadableSink(RecordingSink):
    """Records unreadable objects, and fails on pods of one name."""

    def unreadable(self, kind: Change, meta: Any, why: str) -> None:
        self.calls.append(f"{kind} cannot be read: {meta.name}")

    def changed(self, kind: Change, object: Pod) -> None:
        if object.metadata.name == "poison":
            raise ZeroDivisionError("unexpected")
        super().changed(kind, object)


def test_an_error_in_the_sink_does_not_end_the_watch(caplog):
    run = ReflectorRun(
        page(1, pod("b", 1)), [[event("ADDED", pod("poison", 2))]], page(5, pod("a", 5)), [], sink=UnreadableSink()
    )
    assert run.reflector.faults == 1
    assert run.sink.pods == {"a": "5"}
    assert "has failed; it starts again" in caplog.text


@pytest.mark.parametrize(
    ("odd", "name"),
    [
        ('"text"', ""),
        ("[]", ""),
        ("1e300", ""),
        ('{"metadata":{"name":"bad"},"status":' + DEEP + "}", "bad"),
        ('{"metadata":{"name":"bad"},"spec":{"nodeName":1}}', "bad"),
        ('{"metadata":{"name":"bad","labels":[]},"spec":{"priority":1e300}}', "bad"),
    ],
    ids=["text", "list", "number", "deep", "wrong type", "wrong types"],
)
def test_an_undecodable_object_is_named_and_the_others_are_delivered(odd: str, name: str):
    both = odd.encode() + b"," + json.dumps(pod("a", 1)).encode()
    first = b'{"metadata":{"resourceVersion":"3"},"items":[' + both + b"]}"
    then = [b'{"type":"MODIFIED","object":' + odd.encode() + b"}", event("ADDED", pod("b", 4))]
    run = ReflectorRun(first, [then], sink=UnreadableSink())
    calls = [text for text in run.sink.calls if text != "flushed"]
    assert calls[:4] == [
        f"ADDED cannot be read: {name}", "listed a", f"MODIFIED cannot be read: {name}", "ADDED b",
    ]  # fmt: skip
    assert (run.reflector.faults, run.reflector.lists, run.reflector.undecodable) == (0, 1, 2)


@pytest.mark.parametrize("status", [403, 500, 0])
def test_an_unavailable_optional_collection_does_not_delay_the_start(status: int, caplog):
    refused = ApiError(status, "Odd", "no podgroups for you")
    run = ReflectorRun(refused, page(1, pod("a", 1)), [], optional=True)
    assert run.synced[0]
    assert run.sink.pods == {"a": "1"}
    assert caplog.text.count("is treated as empty") == 1


def test_a_forbidden_optional_collection_is_retried_with_growing_pauses_and_logged_once(caplog):
    refused = ApiError(403, "Forbidden", "no podgroups for you")
    run = ReflectorRun(*[refused] * 5, page(1, pod("a", 1)), [], optional=True)
    assert [round(pause / 1.1) for pause in run.pauses[:5]] == [60, 120, 240, 480, 600]
    assert caplog.text.count("is treated as empty") == 1
    assert run.reflector.denied == ""


def test_a_required_collection_is_waited_for():
    refused = ApiError(403, "Forbidden", "no nodes for you")
    run = ReflectorRun(refused, page(1, pod("a", 1)), [])
    assert not run.synced[0]
    assert run.sink.pods == {"a": "1"}


def test_an_optional_collection_is_located_until_it_is_served():
    paths = iter(["", "", "/apis/scheduling.k8s.io/v1beta1/podgroups"])

    async def locate() -> str:
        return next(paths)

    run = ReflectorRun(page(1, pod("a", 1)), [], optional=True, locate=locate)
    assert run.synced[0]
    assert run.sink.pods == {"a": "1"}
    assert run.reflector.path == "/apis/scheduling.k8s.io/v1beta1/podgroups"
