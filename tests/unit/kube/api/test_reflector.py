"""The reflector against an API of a script: each list and each watch is what the test says.

It does not prove that a real API server sends such things; tests/real/kubernetes does.
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


class Over(BaseException):
    """The script has ended. No Exception: a reflector goes on after those."""


class ScriptedApi:
    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, str]] = []
        self.idle_timeout_s: list[float] = []

    def _next(self, params: Mapping[str, str] | None) -> Any:
        if not self.answers:
            raise Over
        self.asked.append(dict(params or {}))
        return self.answers.pop(0)

    async def request(
        self, method: str, path: str, *, params: Mapping[str, str] | None = None, timeout_s: float
    ) -> bytes:
        now = self._next(params)
        if isinstance(now, ApiError):
            raise now
        return bytes(now)

    async def stream(
        self, path: str, params: Mapping[str, str], *, idle_timeout_s: float
    ) -> AsyncGenerator[list[bytes], None]:
        self.idle_timeout_s.append(idle_timeout_s)
        now = self._next(params)
        if isinstance(now, ApiError):
            raise now
        for batch in now:
            if isinstance(batch, ApiError):
                raise batch
            yield batch


class Picture:
    def __init__(self) -> None:
        self.pods: dict[str, str] = {}
        self.heard: list[str] = []

    def listed(self, objects: list[Pod]) -> None:
        self.pods = {pod.metadata.name: pod.metadata.resource_version for pod in objects}
        self.heard.append("listed " + " ".join(self.pods))

    def changed(self, kind: Change, object: Pod) -> None:
        self.heard.append(f"{kind} {object.metadata.name}")
        if kind == "DELETED":
            self.pods.pop(object.metadata.name)
        else:
            self.pods[object.metadata.name] = object.metadata.resource_version

    def flushed(self) -> None:
        self.heard.append("flushed")


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


class Played:
    """The script, played to its end."""

    def __init__(self, *answers: Any, picture: Picture | None = None, **how: Any) -> None:
        self.api = ScriptedApi(*answers)
        self.picture = picture or Picture()
        self.synced: list[bool] = []
        self.pauses: list[float] = []
        self.now = 0.0
        self.problems: list[str] = []
        asyncio.run(self._play(how))

    async def _play(self, how: dict[str, Any]) -> None:
        async def sleep(seconds: float) -> None:
            self.pauses.append(seconds)
            self.problems.append(self.reflector.problem)
            self.synced.append(self.reflector.synced.is_set())
            self.now += seconds

        self.reflector = Reflector(
            self.api,  # type: ignore[arg-type]
            PODS, self.picture, monotonic=lambda: self.now, sleep=sleep, random_fraction=lambda: 1.0, **how,
        )  # fmt: skip
        with pytest.raises(Over):
            await self.reflector.run()

    @property
    def lists(self) -> list[dict[str, str]]:
        return [params for params in self.api.asked if "watch" not in params]

    @property
    def watched_from(self) -> list[str]:
        return [params["resourceVersion"] for params in self.api.asked if "watch" in params]


def test_it_lists_and_then_tells_each_change_in_order_with_one_end_per_batch():
    played = Played(
        page(10, pod("a", 3), pod("b", 4)),
        [[event("ADDED", pod("c", 11)), event("MODIFIED", pod("a", 12))], [event("DELETED", pod("b", 13))]],
    )
    assert played.picture.heard == [
        "listed a b", "flushed", "ADDED c", "MODIFIED a", "flushed", "DELETED b", "flushed",
    ]  # fmt: skip
    assert played.picture.pods == {"a": "12", "c": "11"}
    assert played.reflector.synced.is_set()


def test_the_first_list_is_from_memory_with_a_limit_and_the_selectors_go_everywhere():
    selector = {"fieldSelector": "spec.nodeName="}
    played = Played(page(10), [[]], selector=selector)
    assert played.api.asked[0] == {"fieldSelector": "spec.nodeName=", "limit": "2000", "resourceVersion": "0"}
    assert played.api.asked[1] == {
        "fieldSelector": "spec.nodeName=", "watch": "true", "allowWatchBookmarks": "true", "resourceVersion": "10",
        "timeoutSeconds": "319",
    }  # fmt: skip


def test_a_long_list_comes_in_pages_and_is_told_as_one_picture():
    played = Played(
        page(10, pod("a", 1), next="more"), page(10, pod("b", 2), next="still"), page(10, pod("c", 3)), [[]]
    )
    assert played.picture.heard[0] == "listed a b c"
    assert [params.get("continue") for params in played.lists] == [None, "more", "still"]
    assert "resourceVersion" not in played.lists[1]


def test_pages_that_run_out_half_way_are_listed_again_without_pages():
    played = Played(page(10, pod("a", 1), next="more"), expired(), page(12, pod("a", 1), pod("b", 2)), [[]])
    assert "limit" not in played.lists[2]
    assert played.picture.heard[0] == "listed a b", "half a list is no picture"


def test_a_watch_that_ends_is_resumed_from_the_last_change():
    played = Played(page(10), [[event("ADDED", pod("a", 11))]], [[event("ADDED", pod("b", 12))]], [[]])
    assert played.watched_from == ["10", "11", "12"]
    assert len(played.lists) == 1


def test_a_watch_that_is_cut_is_resumed_from_the_last_bookmark_and_nothing_is_repeated():
    cut = ApiError(0, "Unreached", "the connection broke")
    played = Played(
        page(10), [[event("ADDED", pod("a", 11))], [bookmark(50)], cut], [[event("MODIFIED", pod("a", 51))]]
    )
    assert played.watched_from == ["10", "50"]
    assert played.picture.heard == ["listed ", "flushed", "ADDED a", "flushed", "flushed", "MODIFIED a", "flushed"]


@pytest.mark.parametrize(
    "gone",
    [
        pytest.param(expired(), id="as an answer"),
        pytest.param([[event("ERROR", {"kind": "Status", "status": "Failure", "code": 410, "reason": "Expired"})]],
                     id="as an event"),
        pytest.param([[event("ADDED", pod("x", 11)), event("ERROR", {"kind": "Status", "status": "Failure", "code": 410})]],
                     id="as an event after others"),
    ],
)  # fmt: skip
def test_a_version_that_is_not_kept_any_more_is_answered_by_a_new_list(gone: Any):
    played = Played(page(10, pod("a", 3)), gone, page(90, pod("b", 80)), [[]])
    assert [params.get("resourceVersion") for params in played.lists] == ["0", None], "never back in time"
    assert "listed b" in played.picture.heard
    assert played.picture.pods == {"b": "80"}
    assert played.watched_from[-1] == "90"


@pytest.mark.parametrize("line", [b"{garbage", b"[]", b'{"type":"ODD","object":{"metadata":{}}}', b'{"object":1}'])
def test_a_line_that_nobody_understands_is_answered_by_a_new_list(line: bytes):
    played = Played(
        page(10), [[event("ADDED", pod("a", 11)), line, event("ADDED", pod("b", 12))]], page(13, pod("b", 12)), [[]]
    )
    assert played.picture.heard[:5] == ["listed ", "flushed", "ADDED a", "flushed", "listed b"]


def test_an_error_event_of_another_kind_is_told_and_answered_by_a_new_list():
    failure = event("ERROR", {"kind": "Status", "status": "Failure", "code": 500, "message": "etcd is on fire"})
    played = Played(page(10), [[failure]], page(20, pod("a", 15)), [[]])
    assert "etcd is on fire" in played.problems[0]
    assert played.picture.pods == {"a": "15"}
    assert played.reflector.problem == ""


def test_nulls_where_lists_belong_are_read_and_empty_lines_are_passed_over():
    odd = pod("a", 11, spec={"containers": None, "tolerations": None})
    played = Played(page(10, pod("b", 3, spec={"containers": None})), [[event("ADDED", odd), b"", bookmark(12)]], [[]])
    assert played.picture.pods == {"a": "11", "b": "3"}
    assert played.watched_from == ["10", "12"]


def test_an_object_that_is_not_what_was_expected_is_left_out_and_counted(caplog: pytest.LogCaptureFixture):
    odd = pod("odd", 4, spec={"containers": 7})
    played = Played(page(10, pod("a", 3), odd), [[event("ADDED", odd), event("ADDED", pod("b", 12))]], [[]])
    assert sorted(played.picture.pods) == ["a", "b"]
    assert played.reflector.undecodable == 2
    assert "is ignored" in caplog.text


def test_a_collection_that_is_not_installed_is_empty_and_asked_for_every_minute():
    absent = ApiError(404, "NotFound", "the server could not find the requested resource")
    played = Played(absent, absent, page(10, pod("a", 3)), [[]])
    assert played.picture.heard[:4] == ["listed ", "flushed", "listed ", "flushed"]
    assert played.pauses[:2] == [pytest.approx(66.0)] * 2
    assert played.problems[0] == ""
    assert played.picture.pods == {"a": "3"}


def test_a_collection_that_is_uninstalled_becomes_empty():
    absent = ApiError(404, "NotFound", "not there")
    played = Played(page(10, pod("a", 3)), absent, absent)
    assert played.picture.pods == {}


def test_what_is_forbidden_is_told_once_a_minute_and_is_no_picture(caplog: pytest.LogCaptureFixture):
    forbidden = ApiError(403, "Forbidden", "pods is forbidden", hint="Grant it.")
    played = Played(*[forbidden] * 8)
    assert played.problems == ["pods is forbidden Grant it."] * 8
    assert played.pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]  # it may be for a moment only
    assert len(caplog.records) == 2
    assert not played.reflector.synced.is_set()
    assert played.picture.heard == []


def test_a_list_that_is_none_is_told_and_asked_for_again():
    played = Played(b"<html>login</html>", page(10, pod("a", 3)), [[]])
    assert "The list of /api/v1/pods cannot be decoded" in played.problems[0]
    assert played.picture.pods == {"a": "3"}


def test_pauses_grow_to_half_a_minute_while_the_api_is_away():
    away = ApiError(0, "Unreached", "refused")
    played = Played(*[away] * 9)
    assert played.pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]


def test_a_watch_that_ends_as_soon_as_it_begins_is_not_repeated_at_full_speed():
    played = Played(page(10), [], [], [])
    assert played.pauses == [1.0, 2.0, 4.0]
    assert len(played.lists) == 1


def test_a_silent_watch_is_cut_after_twice_its_bound_at_the_latest():
    assert Played(page(10), [[]]).api.idle_timeout_s[0] == 150.0
    assert Played(page(10), [[]], watch_s=20).api.idle_timeout_s[0] == 44.0


def test_other_tasks_have_their_turn_while_a_big_list_is_decoded():
    async def story() -> int:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        api = ScriptedApi(page(10, *(pod(f"p{n}", n) for n in range(3000))))
        task = asyncio.create_task(other())
        with pytest.raises(Over):
            await Reflector(api, PODS, Picture()).run()  # type: ignore[arg-type]
        task.cancel()
        return turns

    assert asyncio.run(story()) >= 6


# -------------------------------------------------------------------------------- whatever an object holds


DEEP = '{"a":' * 5000 + "1" + "}" * 5000


class Keen(Picture):
    """It wants to know what cannot be read, and can itself do nothing with pods of one name."""

    def unreadable(self, kind: Change, meta: Any, why: str) -> None:
        self.heard.append(f"{kind} cannot be read: {meta.name}")

    def changed(self, kind: Change, object: Pod) -> None:
        if object.metadata.name == "poison":
            raise ZeroDivisionError("what nobody foresaw")
        super().changed(kind, object)


def test_what_goes_wrong_while_a_change_is_taken_in_does_not_end_the_watch(caplog):
    played = Played(
        page(1, pod("b", 1)), [[event("ADDED", pod("poison", 2))]], page(5, pod("a", 5)), [], picture=Keen()
    )
    assert played.reflector.faults == 1
    assert played.picture.pods == {"a": "5"}
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
def test_an_object_that_cannot_be_decoded_is_named_and_the_others_are_taken(odd: str, name: str):
    both = odd.encode() + b"," + json.dumps(pod("a", 1)).encode()
    first = b'{"metadata":{"resourceVersion":"3"},"items":[' + both + b"]}"
    then = [b'{"type":"MODIFIED","object":' + odd.encode() + b"}", event("ADDED", pod("b", 4))]
    played = Played(first, [then], picture=Keen())
    told = [text for text in played.picture.heard if text != "flushed"]
    assert told[:4] == [
        f"ADDED cannot be read: {name}", "listed a", f"MODIFIED cannot be read: {name}", "ADDED b",
    ]  # fmt: skip
    assert (played.reflector.faults, played.reflector.lists, played.reflector.undecodable) == (0, 1, 2)


# ------------------------------------------------------------------------------------ what can be done without


@pytest.mark.parametrize("status", [403, 500, 0])
def test_nobody_waits_for_an_optional_collection_that_cannot_be_had(status: int, caplog):
    refused = ApiError(status, "Odd", "no podgroups for you")
    played = Played(refused, page(1, pod("a", 1)), [], optional=True)
    assert played.synced[0]
    assert played.picture.pods == {"a": "1"}
    assert caplog.text.count("is treated as empty") == 1


def test_what_is_forbidden_is_asked_for_after_growing_pauses_and_logged_once(caplog):
    refused = ApiError(403, "Forbidden", "no podgroups for you")
    played = Played(*[refused] * 5, page(1, pod("a", 1)), [], optional=True)
    assert [round(pause / 1.1) for pause in played.pauses[:5]] == [60, 120, 240, 480, 600]
    assert caplog.text.count("is treated as empty") == 1
    assert played.reflector.denied == ""


def test_what_is_not_optional_is_waited_for():
    refused = ApiError(403, "Forbidden", "no nodes for you")
    played = Played(refused, page(1, pod("a", 1)), [])
    assert not played.synced[0]
    assert played.picture.pods == {"a": "1"}


def test_the_version_of_an_optional_collection_is_looked_for_until_it_is_there():
    paths = iter(["", "", "/apis/scheduling.k8s.io/v1beta1/podgroups"])

    async def locate() -> str:
        return next(paths)

    played = Played(page(1, pod("a", 1)), [], optional=True, locate=locate)
    assert played.synced[0]
    assert played.picture.pods == {"a": "1"}
    assert played.reflector.path == "/apis/scheduling.k8s.io/v1beta1/podgroups"
