"""The status of a pod, as kubelets and controllers write it, becomes the state of a run."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from hodei.backends.kubernetes.runs import (
    RunPod,
    StopCause,
    deadline_s,
    forced_end,
    health_failure,
    observe_pod,
    parse_time_ms,
    remaining_grace_s,
    removed_end,
    start_failure,
)  # fmt: skip
from hodei.kube.api.objects import from_builtins

NOW_MS = 1_800_000_000_000
MINUTE_MS = 60_000


def stamp(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def a_pod(
    container: dict[str, Any] | None = None,
    phase: str = "Running",
    *,
    deletion_requested_ms: int = 0,
    grace_s: int = 30,
    ending: str = "",
    node: str = "n1",
    notes: dict[str, str] | None = None,
    deadline: int | None = None,
    **status: Any,
) -> RunPod:
    meta: dict[str, Any] = {
        "labels": {"hodei.io/run": "1.0.1"},
        "annotations": {**(notes or {}), **({"hodei.io/end": ending} if ending else {})},
        "creationTimestamp": stamp(NOW_MS - 10 * MINUTE_MS),
    }
    if deletion_requested_ms:
        meta |= {
            "deletionTimestamp": stamp(deletion_requested_ms + 1000 * grace_s),
            "deletionGracePeriodSeconds": grace_s,
        }
    found = {"phase": phase, "startTime": stamp(NOW_MS - 9 * MINUTE_MS), **status}
    if container is not None:
        found["containerStatuses"] = [{"name": "main", "state": container}]
    spec = {"nodeName": node, "activeDeadlineSeconds": deadline}
    return from_builtins({"metadata": meta, "spec": spec, "status": found}, RunPod)


def ended(code: int, reason: str = "", message: str = "", ago_ms: int = 5000) -> dict[str, Any]:
    said = reason or ("Completed" if code == 0 else "Error")
    return {"terminated": {"exitCode": code, "reason": said, "message": message, "finishedAt": stamp(NOW_MS - ago_ms)}}


def running(ago_ms: int = 8 * MINUTE_MS) -> dict[str, Any]:
    return {"running": {"startedAt": stamp(NOW_MS - ago_ms)}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def target(reason: str) -> list[dict[str, str]]:
    return [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "told so"}]


STOPPED = '{"reason":"preempted by 7"}'
GIVEN_UP = '{"reason":"no image","code":"start_failed"}'
RECENTLY = NOW_MS - 20_000


@pytest.mark.parametrize(
    ("pod", "state", "exit_code", "code"),
    [
        # on its way
        pytest.param(a_pod(phase="Pending"), "placed", None, "", id="nothing said yet"),
        pytest.param(a_pod(waiting("ContainerCreating"), "Pending"), "placed", None, "", id="being created"),
        pytest.param(a_pod(waiting("ImagePullBackOff"), "Pending"), "placed", None, "", id="its image does not come"),
        pytest.param(a_pod(running()), "running", None, "", id="running"),
        pytest.param(a_pod(running(), deletion_requested_ms=RECENTLY), "running", None, "", id="told to go and not gone"),
        # by itself
        pytest.param(a_pod(ended(0), "Succeeded"), "succeeded", 0, "", id="exit 0"),
        pytest.param(a_pod(ended(7), "Failed"), "failed", 7, "", id="exit 7"),
        pytest.param(a_pod(ended(137), "Failed"), "failed", 137, "killed", id="killed by nobody that we know"),
        pytest.param(a_pod(ended(137, "OOMKilled"), "Failed"), "failed", 137, "oom", id="out of memory"),
        pytest.param(
            a_pod(ended(143), "Failed", reason="DeadlineExceeded"), "failed", 143, "timeout", id="out of time"
        ),
        pytest.param(a_pod(phase="Failed", reason="DeadlineExceeded"), "failed", None, "timeout",
                     id="out of time, container unknown"),
        pytest.param(a_pod(ended(128, "StartError", 'exec: "x": executable file not found in $PATH'), "Failed"),
                     "failed", 127, "", id="no such command"),
        pytest.param(a_pod(ended(128, "StartError", "exec /x: permission denied"), "Failed"),
                     "failed", 126, "", id="a command that may not be run"),
        pytest.param(a_pod(ended(128, "StartError", "cgroup trouble"), "Failed"),
                     "failed", None, "start_failed", id="a container that could not be made"),
        # told to go by us
        pytest.param(a_pod(ended(9), "Failed", deletion_requested_ms=RECENTLY, ending=STOPPED), "stopped", 9, "", id="stopped"),
        pytest.param(a_pod(ended(0), "Succeeded", deletion_requested_ms=RECENTLY, ending=STOPPED), "stopped", 0, "",
                     id="stopped, and went in peace"),
        pytest.param(a_pod(ended(0), "Succeeded", ending=STOPPED), "succeeded", 0, "",
                     id="to be stopped, but was done before"),
        pytest.param(a_pod(phase="Pending", deletion_requested_ms=RECENTLY, grace_s=0, ending=STOPPED), "stopped", None, "",
                     id="stopped before it began"),
        pytest.param(a_pod(phase="Pending", deletion_requested_ms=RECENTLY, node="", ending=STOPPED), "stopped", None, "",
                     id="stopped before it had a node"),
        pytest.param(a_pod(phase="Pending", deletion_requested_ms=RECENTLY, ending=STOPPED), "placed", None, "",
                     id="to be stopped before it began, its node has not said yes"),
        pytest.param(a_pod(phase="Failed", deletion_requested_ms=RECENTLY, ending=GIVEN_UP), "failed", None, "start_failed",
                     id="given up"),
        # told to go by others
        pytest.param(a_pod(ended(143), "Failed", deletion_requested_ms=RECENTLY), "lost", 143, "lost", id="deleted by others"),
        pytest.param(a_pod(ended(0), "Succeeded", deletion_requested_ms=RECENTLY), "lost", 0, "lost",
                     id="deleted by others, and went in peace"),
        pytest.param(a_pod(ended(0, ago_ms=MINUTE_MS), "Succeeded", deletion_requested_ms=RECENTLY, grace_s=0),
                     "succeeded", 0, "", id="deleted by others after it was done"),
        pytest.param(a_pod(ended(7, ago_ms=MINUTE_MS), "Failed", deletion_requested_ms=RECENTLY, grace_s=0),
                     "failed", 7, "", id="deleted by others after it had failed"),
        pytest.param(a_pod(phase="Pending", deletion_requested_ms=RECENTLY, grace_s=0), "lost", None, "lost",
                     id="deleted by others before it began"),
        # taken by the node or the cluster
        pytest.param(a_pod(ended(137), "Failed", reason="Evicted", message="The node was low on resource: memory."),
                     "lost", 137, "lost", id="evicted by a node in need"),
        pytest.param(a_pod(ended(137), "Failed", reason="Evicted",
                           message="Pod ephemeral local storage usage exceeds the total limit of containers 1Gi."),
                     "failed", 137, "killed", id="evicted for its own use"),
        pytest.param(a_pod(phase="Failed", reason="Evicted"), "lost", None, "lost", id="evicted, container unknown"),
        pytest.param(a_pod(ended(143), "Failed", reason="Terminated"), "lost", 143, "lost", id="its node shut down"),
        pytest.param(a_pod(ended(143), "Failed", conditions=target("PreemptionByScheduler")), "lost", 143, "lost",
                     id="preempted by another scheduler"),
        pytest.param(a_pod(running(), "Failed", conditions=target("DeletionByPodGC")), "lost", None, "lost",
                     id="its node was taken away"),
        pytest.param(a_pod(ended(137, "ContainerStatusUnknown"), "Failed"), "lost", None, "lost",
                     id="its node does not remember it"),
        # refused by the node
        pytest.param(a_pod(phase="Failed", reason="OutOfcpu"), "failed", None, "start_failed", id="no cpu left"),
        pytest.param(a_pod(phase="Failed", reason="OutOfpods"), "failed", None, "start_failed", id="no place left"),
        pytest.param(a_pod(phase="Failed", reason="UnexpectedAdmissionError"), "failed", None, "start_failed",
                     id="a device that is not there"),
        pytest.param(a_pod(phase="Failed"), "failed", None, "start_failed", id="not started, nobody says why"),
    ],
)  # fmt: skip
def test_the_status_of_a_pod_becomes_the_state_of_its_run(pod, state, exit_code, code):
    seen = observe_pod(pod, NOW_MS)
    assert (seen.run, seen.state, seen.exit_code, seen.reason_code) == ("1.0.1", state, exit_code, code)
    assert seen.at_ms <= NOW_MS
    if state in ("lost", "failed"):
        assert seen.reason


def test_sidecar_containers_do_not_count():
    beside = {"name": "a-proxy", "state": running()}
    ours = {"name": "main", "state": ended(7)}
    pod = from_builtins(
        {"metadata": {"labels": {"hodei.io/run": "1.0.1"}}, "spec": {"nodeName": "n1"},
         "status": {"phase": "Running", "containerStatuses": [beside, ours]}},
        RunPod,
    )  # fmt: skip
    assert (observe_pod(pod, NOW_MS).state, observe_pod(pod, NOW_MS).exit_code) == ("failed", 7)


def test_times_come_from_the_node_and_are_never_in_the_future():
    assert observe_pod(a_pod(ended(0, ago_ms=5000), "Succeeded"), NOW_MS).at_ms == NOW_MS - 5000
    assert observe_pod(a_pod(ended(0, ago_ms=-5000), "Succeeded"), NOW_MS).at_ms == NOW_MS
    assert parse_time_ms("yesterday", 42) == parse_time_ms(None, 42) == 42


def test_an_end_has_its_start_and_end_times_however_late_it_is_seen():
    over = ended(0, ago_ms=5 * MINUTE_MS)
    over["terminated"]["startedAt"] = stamp(NOW_MS - 7 * MINUTE_MS)
    seen = observe_pod(a_pod(over, "Succeeded"), NOW_MS)
    assert (seen.started_ms, seen.at_ms) == (NOW_MS - 7 * MINUTE_MS, NOW_MS - 5 * MINUTE_MS)


@pytest.mark.parametrize("nothing", [None, "", "1970-01-01T00:00:00Z", "0001-01-01T00:00:00Z", "soon"])
def test_a_missing_time_is_replaced(nothing):
    over = {"terminated": {"exitCode": 137, "reason": "Error", "startedAt": nothing, "finishedAt": nothing}}
    seen = observe_pod(a_pod(over, "Failed"), NOW_MS)
    assert (seen.started_ms, seen.at_ms) == (0, NOW_MS)


def test_an_ended_pod_without_container_status_ended_at_its_last_change():
    changes = [
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp(NOW_MS - 9 * MINUTE_MS)},
        {"type": "Ready", "status": "False", "lastTransitionTime": stamp(NOW_MS - 3 * MINUTE_MS)},
    ]
    seen = observe_pod(a_pod(phase="Failed", reason="Evicted", conditions=changes), NOW_MS)
    assert (seen.state, seen.at_ms) == ("lost", NOW_MS - 3 * MINUTE_MS)


def test_reasons_name_the_cause_of_an_end():
    assert (
        observe_pod(a_pod(ended(9), deletion_requested_ms=RECENTLY, ending=STOPPED), NOW_MS).reason == "preempted by 7"
    )
    taken = observe_pod(a_pod(ended(143), "Failed", conditions=target("EvictionByEvictionAPI")), NOW_MS)
    assert "EvictionByEvictionAPI: told so" in taken.reason
    full = observe_pod(a_pod(phase="Failed", reason="OutOfpods", message="Node has no room"), NOW_MS)
    assert full.reason == "OutOfpods: Node has no room"
    waits = observe_pod(a_pod(waiting("ErrImagePull", "no such host"), "Pending"), NOW_MS)
    assert waits.reason == "ErrImagePull: no such host"


def test_a_removed_pod_is_stopped_if_we_stopped_it_and_lost_otherwise():
    assert removed_end(a_pod(running()), NOW_MS).state == "lost"
    assert removed_end(a_pod(running(), deletion_requested_ms=RECENTLY, ending=STOPPED), NOW_MS).state == "stopped"


@pytest.mark.parametrize(
    ("pod", "given_up"),
    [
        pytest.param(a_pod(waiting("InvalidImageName"), "Pending"), (True, True), id="no image's name"),
        pytest.param(a_pod(waiting("ImagePullBackOff"), "Pending"), (True, False), id="an image that does not come"),
        pytest.param(a_pod(waiting("ContainerCreating"), "Pending"), (False, False), id="still being created"),
        pytest.param(a_pod(phase="Pending", node=""), (True, False), id="no scheduler took it"),
        pytest.param(a_pod(running()), (False, False), id="running"),
        pytest.param(
            a_pod(waiting("ErrImagePull"), deletion_requested_ms=RECENTLY), (False, False), id="being stopped"
        ),
    ],
)
def test_a_container_that_cannot_start_fails_the_run(pod, given_up):
    found = start_failure(pod, NOW_MS, 2 * MINUTE_MS)
    assert (found is not None, found is not None and found.permanent) == given_up


def test_an_image_pull_may_fail_for_a_while():
    pod = a_pod(waiting("ErrImagePull", "try again"), "Pending")
    assert start_failure(pod, NOW_MS, 11 * MINUTE_MS) is None
    assert start_failure(pod, NOW_MS, 9 * MINUTE_MS) == StopCause("ErrImagePull: try again", "start_failed")


def test_a_pod_deleted_by_force_is_lost_if_its_node_stays_silent():
    assert forced_end(a_pod(running(), deletion_requested_ms=NOW_MS - 30_000, grace_s=0), NOW_MS) is None
    end = forced_end(a_pod(running(), deletion_requested_ms=NOW_MS - 90_000, grace_s=0), NOW_MS)
    assert end is not None
    assert end.state == "lost"
    assert forced_end(a_pod(running(), deletion_requested_ms=NOW_MS - 90_000, grace_s=600), NOW_MS) is None


@pytest.mark.parametrize(
    ("pod", "seconds"),
    [
        pytest.param(a_pod(running(), notes={"hodei.io/timeout-ms": "90000"}), 150, id="counted from its command"),
        pytest.param(a_pod(running()), 0, id="no bound"),
        pytest.param(a_pod(running(), notes={"hodei.io/timeout-ms": "90000"}, deadline=150), 0, id="said already"),
        pytest.param(a_pod(waiting("ContainerCreating"), notes={"hodei.io/timeout-ms": "90000"}), 0, id="not begun"),
        pytest.param(
            a_pod(running(), notes={"hodei.io/timeout-ms": "90000"}, deletion_requested_ms=RECENTLY), 0, id="going"
        ),
    ],
)
def test_the_timeout_counts_from_the_command_and_not_from_the_image_pull(pod, seconds):
    assert deadline_s(pod) == seconds


@pytest.mark.parametrize(
    ("pod", "grace_s", "asked_for"),
    [
        pytest.param(a_pod(running()), 30, 30, id="the first order"),
        pytest.param(a_pod(running()), 0, 1, id="at once: the least that a node gives"),
        pytest.param(
            a_pod(running(), deletion_requested_ms=RECENTLY, grace_s=60), 10, 30, id="an earlier end shortens"
        ),
        pytest.param(
            a_pod(running(), deletion_requested_ms=RECENTLY, grace_s=60), 50, None, id="a later end changes nothing"
        ),
        pytest.param(
            a_pod(running(), deletion_requested_ms=RECENTLY, grace_s=1), 0, None, id="nothing left to shorten"
        ),
    ],
)
def test_a_second_stop_never_extends_the_grace_period(pod, grace_s, asked_for):
    assert remaining_grace_s(pod, NOW_MS, grace_s) == asked_for


EVERY_10_S = '{"health":{"command":["x"],"every_ms":10000,"timeout_ms":1000,"failures":3}}'


def a_probed_pod(ran_s: int, ready: bool, since_s: int | None = None, care: str = EVERY_10_S) -> RunPod:
    container = {"name": "main", "ready": ready, "state": running(ran_s * 1000)}
    said = [] if since_s is None else [
        {"type": "ContainersReady", "status": str(ready), "lastTransitionTime": stamp(NOW_MS - since_s * 1000)}
    ]  # fmt: skip
    return a_pod(notes={"hodei.io/supervision": care}, containerStatuses=[container], conditions=said)


@pytest.mark.parametrize(
    ("ran_s", "ready", "since_s", "health", "is_unwell"),
    [
        pytest.param(5, False, 5, "", False, id="no look is over yet"),
        pytest.param(12, False, 12, "failing", False, id="one look failed"),
        pytest.param(30, False, 30, "failing", False, id="two looks failed, the third is on its way"),
        pytest.param(31, False, 31, "failing", True, id="never well"),
        pytest.param(31, False, None, "failing", True, id="never well, and no condition"),
        pytest.param(900, True, 900, "ok", False, id="well"),
        pytest.param(900, False, 3, "failing", False, id="a kubelet that has just started says so"),
        pytest.param(900, False, 11, "failing", True, id="it holds"),
    ],
)
def test_a_run_is_unhealthy_when_its_probe_has_failed_for_long_enough(ran_s, ready, since_s, health, is_unwell):
    pod = a_probed_pod(ran_s, ready, since_s)
    assert observe_pod(pod, NOW_MS).health == health
    ending = health_failure(pod, NOW_MS)
    assert (ending is not None) == is_unwell
    if ending is not None:
        assert (ending.code, ending.reason) == ("unhealthy", "its health check failed 3 times in a row")


@pytest.mark.parametrize("care", ["", "{", '{"file":"/x"}', '{"health":{"file":"/beat","every_ms":10}}'])
def test_a_pod_without_a_probe_is_never_unhealthy(care):
    pod = a_probed_pod(9000, False, 9000, care)
    assert (observe_pod(pod, NOW_MS).health, health_failure(pod, NOW_MS)) == ("", None)


def test_a_pod_under_deletion_is_not_stopped_for_its_health():
    pod = a_pod(running(), deletion_requested_ms=RECENTLY, notes={"hodei.io/supervision": EVERY_10_S})
    assert health_failure(pod, NOW_MS) is None


def test_a_failed_checkpoint_is_part_of_the_stop_reason():
    pod = a_pod(
        ended(143), deletion_requested_ms=RECENTLY, ending='{"reason":"drained","note":"no checkpoint was seen"}'
    )
    assert observe_pod(pod, NOW_MS).reason == "drained; no checkpoint was seen"
