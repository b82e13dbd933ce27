"""The state of a run, from the status of its pod as kubelets and controllers write it."""

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
    annotations: dict[str, str] | None = None,
    deadline: int | None = None,
    **status: Any,
) -> RunPod:
    meta: dict[str, Any] = {
        "labels": {"hodei.io/run": "1.0.1"},
        "annotations": {**(annotations or {}), **({"hodei.io/end": ending} if ending else {})},
        "creationTimestamp": stamp(NOW_MS - 10 * MINUTE_MS),
    }
    if deletion_requested_ms:
        meta |= {
            "deletionTimestamp": stamp(deletion_requested_ms + 1000 * grace_s),
            "deletionGracePeriodSeconds": grace_s,
        }
    pod_status = {"phase": phase, "startTime": stamp(NOW_MS - 9 * MINUTE_MS), **status}
    if container is not None:
        pod_status["containerStatuses"] = [{"name": "main", "state": container}]
    spec = {"nodeName": node, "activeDeadlineSeconds": deadline}
    return from_builtins({"metadata": meta, "spec": spec, "status": pod_status}, RunPod)


def ended(code: int, reason: str = "", message: str = "", ago_ms: int = 5000) -> dict[str, Any]:
    reason = reason or ("Completed" if code == 0 else "Error")
    return {
        "terminated": {"exitCode": code, "reason": reason, "message": message, "finishedAt": stamp(NOW_MS - ago_ms)}
    }


def running(ago_ms: int = 8 * MINUTE_MS) -> dict[str, Any]:
    return {"running": {"startedAt": stamp(NOW_MS - ago_ms)}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def target(reason: str) -> list[dict[str, str]]:
    return [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "by test"}]


STOP_ANNOTATION = '{"reason":"preempted by 7"}'
START_FAILED_ANNOTATION = '{"reason":"no image","code":"start_failed"}'
RECENTLY_MS = NOW_MS - 20_000


@pytest.mark.parametrize(
    ("pod", "state", "exit_code", "code"),
    [
        # not ended
        pytest.param(a_pod(phase="Pending"), "placed", None, "", id="without status"),
        pytest.param(a_pod(waiting("ContainerCreating"), "Pending"), "placed", None, "", id="being created"),
        pytest.param(a_pod(waiting("ImagePullBackOff"), "Pending"), "placed", None, "", id="image pull fails"),
        pytest.param(a_pod(running()), "running", None, "", id="running"),
        pytest.param(a_pod(running(), deletion_requested_ms=RECENTLY_MS), "running", None, "", id="being deleted"),
        # ended by itself
        pytest.param(a_pod(ended(0), "Succeeded"), "succeeded", 0, "", id="exit 0"),
        pytest.param(a_pod(ended(7), "Failed"), "failed", 7, "", id="exit 7"),
        pytest.param(a_pod(ended(137), "Failed"), "failed", 137, "killed", id="killed, cause unknown"),
        pytest.param(a_pod(ended(137, "OOMKilled"), "Failed"), "failed", 137, "oom", id="out of memory"),
        pytest.param(
            a_pod(ended(143), "Failed", reason="DeadlineExceeded"), "failed", 143, "timeout", id="deadline exceeded"
        ),
        pytest.param(a_pod(phase="Failed", reason="DeadlineExceeded"), "failed", None, "timeout",
                     id="deadline exceeded, container unknown"),
        pytest.param(a_pod(ended(128, "StartError", 'exec: "x": executable file not found in $PATH'), "Failed"),
                     "failed", 127, "", id="no such command"),
        pytest.param(a_pod(ended(128, "StartError", "exec /x: permission denied"), "Failed"),
                     "failed", 126, "", id="command not executable"),
        pytest.param(a_pod(ended(128, "StartError", "cgroup error"), "Failed"),
                     "failed", None, "start_failed", id="container not created"),
        # stopped by Hodei
        pytest.param(a_pod(ended(9), "Failed", deletion_requested_ms=RECENTLY_MS, ending=STOP_ANNOTATION), "stopped", 9, "", id="stopped"),
        pytest.param(a_pod(ended(0), "Succeeded", deletion_requested_ms=RECENTLY_MS, ending=STOP_ANNOTATION), "stopped", 0, "",
                     id="stopped, exit 0"),
        pytest.param(a_pod(ended(0), "Succeeded", ending=STOP_ANNOTATION), "succeeded", 0, "",
                     id="ended before the stop"),
        pytest.param(a_pod(phase="Pending", deletion_requested_ms=RECENTLY_MS, grace_s=0, ending=STOP_ANNOTATION), "stopped", None, "",
                     id="stopped before its start"),
        pytest.param(a_pod(phase="Pending", deletion_requested_ms=RECENTLY_MS, node="", ending=STOP_ANNOTATION), "stopped", None, "",
                     id="stopped before its binding"),
        pytest.param(a_pod(phase="Pending", deletion_requested_ms=RECENTLY_MS, ending=STOP_ANNOTATION), "placed", None, "",
                     id="stopped before its start, not confirmed by the kubelet"),
        pytest.param(a_pod(phase="Failed", deletion_requested_ms=RECENTLY_MS, ending=START_FAILED_ANNOTATION), "failed", None, "start_failed",
                     id="start failed"),
        # deleted by others
        pytest.param(a_pod(ended(143), "Failed", deletion_requested_ms=RECENTLY_MS), "lost", 143, "lost", id="deleted by others"),
        pytest.param(a_pod(ended(0), "Succeeded", deletion_requested_ms=RECENTLY_MS), "lost", 0, "lost",
                     id="deleted by others, exit 0"),
        pytest.param(a_pod(ended(0, ago_ms=MINUTE_MS), "Succeeded", deletion_requested_ms=RECENTLY_MS, grace_s=0),
                     "succeeded", 0, "", id="deleted by others after exit 0"),
        pytest.param(a_pod(ended(7, ago_ms=MINUTE_MS), "Failed", deletion_requested_ms=RECENTLY_MS, grace_s=0),
                     "failed", 7, "", id="deleted by others after exit 7"),
        pytest.param(a_pod(phase="Pending", deletion_requested_ms=RECENTLY_MS, grace_s=0), "lost", None, "lost",
                     id="deleted by others before its start"),
        # ended by the node or the cluster
        pytest.param(a_pod(ended(137), "Failed", reason="Evicted", message="The node was low on resource: memory."),
                     "lost", 137, "lost", id="evicted by node pressure"),
        pytest.param(a_pod(ended(137), "Failed", reason="Evicted",
                           message="Pod ephemeral local storage usage exceeds the total limit of containers 1Gi."),
                     "failed", 137, "killed", id="evicted for its own usage"),
        pytest.param(a_pod(phase="Failed", reason="Evicted"), "lost", None, "lost", id="evicted, container unknown"),
        pytest.param(a_pod(ended(143), "Failed", reason="Terminated"), "lost", 143, "lost", id="its node shut down"),
        pytest.param(a_pod(ended(143), "Failed", conditions=target("PreemptionByScheduler")), "lost", 143, "lost",
                     id="preempted by another scheduler"),
        pytest.param(a_pod(running(), "Failed", conditions=target("DeletionByPodGC")), "lost", None, "lost",
                     id="its node was deleted"),
        pytest.param(a_pod(ended(137, "ContainerStatusUnknown"), "Failed"), "lost", None, "lost",
                     id="unknown to its node"),
        # refused by the kubelet
        pytest.param(a_pod(phase="Failed", reason="OutOfcpu"), "failed", None, "start_failed", id="no cpu left"),
        pytest.param(a_pod(phase="Failed", reason="OutOfpods"), "failed", None, "start_failed", id="no pod slot left"),
        pytest.param(a_pod(phase="Failed", reason="UnexpectedAdmissionError"), "failed", None, "start_failed",
                     id="a missing device"),
        pytest.param(a_pod(phase="Failed"), "failed", None, "start_failed", id="not started, no reason"),
    ],
)  # fmt: skip
def test_the_status_of_a_pod_becomes_the_state_of_its_run(pod, state, exit_code, code):
    observed = observe_pod(pod, NOW_MS)
    assert (observed.run, observed.state, observed.exit_code, observed.reason_code) == ("1.0.1", state, exit_code, code)
    assert observed.at_ms <= NOW_MS
    if state in ("lost", "failed"):
        assert observed.reason


def test_sidecar_containers_do_not_count():
    sidecar = {"name": "a-proxy", "state": running()}
    main = {"name": "main", "state": ended(7)}
    pod = from_builtins(
        {"metadata": {"labels": {"hodei.io/run": "1.0.1"}}, "spec": {"nodeName": "n1"},
         "status": {"phase": "Running", "containerStatuses": [sidecar, main]}},
        RunPod,
    )  # fmt: skip
    assert (observe_pod(pod, NOW_MS).state, observe_pod(pod, NOW_MS).exit_code) == ("failed", 7)


def test_times_come_from_the_node_and_are_never_in_the_future():
    assert observe_pod(a_pod(ended(0, ago_ms=5000), "Succeeded"), NOW_MS).at_ms == NOW_MS - 5000
    assert observe_pod(a_pod(ended(0, ago_ms=-5000), "Succeeded"), NOW_MS).at_ms == NOW_MS
    assert parse_time_ms("yesterday", 42) == parse_time_ms(None, 42) == 42


def test_an_end_observed_late_has_its_start_and_end_times():
    container = ended(0, ago_ms=5 * MINUTE_MS)
    container["terminated"]["startedAt"] = stamp(NOW_MS - 7 * MINUTE_MS)
    observed = observe_pod(a_pod(container, "Succeeded"), NOW_MS)
    assert (observed.started_ms, observed.at_ms) == (NOW_MS - 7 * MINUTE_MS, NOW_MS - 5 * MINUTE_MS)


@pytest.mark.parametrize("time", [None, "", "1970-01-01T00:00:00Z", "0001-01-01T00:00:00Z", "soon"])
def test_a_missing_time_is_replaced(time):
    container = {"terminated": {"exitCode": 137, "reason": "Error", "startedAt": time, "finishedAt": time}}
    observed = observe_pod(a_pod(container, "Failed"), NOW_MS)
    assert (observed.started_ms, observed.at_ms) == (0, NOW_MS)


def test_an_ended_pod_without_container_status_ended_at_its_last_change():
    changes = [
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp(NOW_MS - 9 * MINUTE_MS)},
        {"type": "Ready", "status": "False", "lastTransitionTime": stamp(NOW_MS - 3 * MINUTE_MS)},
    ]
    observed = observe_pod(a_pod(phase="Failed", reason="Evicted", conditions=changes), NOW_MS)
    assert (observed.state, observed.at_ms) == ("lost", NOW_MS - 3 * MINUTE_MS)


def test_reasons_name_the_cause_of_an_end():
    assert (
        observe_pod(a_pod(ended(9), deletion_requested_ms=RECENTLY_MS, ending=STOP_ANNOTATION), NOW_MS).reason
        == "preempted by 7"
    )
    evicted = observe_pod(a_pod(ended(143), "Failed", conditions=target("EvictionByEvictionAPI")), NOW_MS)
    assert "EvictionByEvictionAPI: by test" in evicted.reason
    full = observe_pod(a_pod(phase="Failed", reason="OutOfpods", message="Node is full"), NOW_MS)
    assert full.reason == "OutOfpods: Node is full"
    pending = observe_pod(a_pod(waiting("ErrImagePull", "no such host"), "Pending"), NOW_MS)
    assert pending.reason == "ErrImagePull: no such host"


def test_a_removed_pod_is_stopped_if_hodei_stopped_it_and_lost_otherwise():
    assert removed_end(a_pod(running()), NOW_MS).state == "lost"
    assert (
        removed_end(a_pod(running(), deletion_requested_ms=RECENTLY_MS, ending=STOP_ANNOTATION), NOW_MS).state
        == "stopped"
    )


@pytest.mark.parametrize(
    ("pod", "fails"),
    [
        pytest.param(a_pod(waiting("InvalidImageName"), "Pending"), (True, True), id="an invalid image name"),
        pytest.param(a_pod(waiting("ImagePullBackOff"), "Pending"), (True, False), id="a failed image pull"),
        pytest.param(a_pod(waiting("ContainerCreating"), "Pending"), (False, False), id="still being created"),
        pytest.param(a_pod(phase="Pending", node=""), (True, False), id="not scheduled"),
        pytest.param(a_pod(running()), (False, False), id="running"),
        pytest.param(
            a_pod(waiting("ErrImagePull"), deletion_requested_ms=RECENTLY_MS), (False, False), id="being stopped"
        ),
    ],
)
def test_a_container_that_cannot_start_fails_the_run(pod, fails):
    found = start_failure(pod, NOW_MS, 2 * MINUTE_MS)
    assert (found is not None, found is not None and found.permanent) == fails


def test_an_image_pull_may_fail_until_the_timeout():
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
        pytest.param(
            a_pod(running(), annotations={"hodei.io/timeout-ms": "90000"}), 150, id="from the start of the command"
        ),
        pytest.param(a_pod(running()), 0, id="no timeout"),
        pytest.param(a_pod(running(), annotations={"hodei.io/timeout-ms": "90000"}, deadline=150), 0, id="already set"),
        pytest.param(
            a_pod(waiting("ContainerCreating"), annotations={"hodei.io/timeout-ms": "90000"}), 0, id="not started"
        ),
        pytest.param(
            a_pod(running(), annotations={"hodei.io/timeout-ms": "90000"}, deletion_requested_ms=RECENTLY_MS),
            0,
            id="being deleted",
        ),
    ],
)
def test_the_timeout_counts_from_the_command_and_not_from_the_image_pull(pod, seconds):
    assert deadline_s(pod) == seconds


@pytest.mark.parametrize(
    ("pod", "grace_s", "requested_s"),
    [
        pytest.param(a_pod(running()), 30, 30, id="first stop"),
        pytest.param(a_pod(running()), 0, 1, id="at once: the minimum of a kubelet"),
        pytest.param(a_pod(running(), deletion_requested_ms=RECENTLY_MS, grace_s=60), 10, 30, id="an earlier end"),
        pytest.param(a_pod(running(), deletion_requested_ms=RECENTLY_MS, grace_s=60), 50, None, id="a later end"),
        pytest.param(a_pod(running(), deletion_requested_ms=RECENTLY_MS, grace_s=1), 0, None, id="no time left"),
    ],
)
def test_a_second_stop_never_extends_the_grace_period(pod, grace_s, requested_s):
    assert remaining_grace_s(pod, NOW_MS, grace_s) == requested_s


EVERY_10_S = '{"health":{"command":["x"],"every_ms":10000,"timeout_ms":1000,"failures":3}}'


def a_probed_pod(ran_s: int, ready: bool, since_s: int | None = None, supervision: str = EVERY_10_S) -> RunPod:
    container = {"name": "main", "ready": ready, "state": running(ran_s * 1000)}
    conditions = [] if since_s is None else [
        {"type": "ContainersReady", "status": str(ready), "lastTransitionTime": stamp(NOW_MS - since_s * 1000)}
    ]  # fmt: skip
    return a_pod(
        annotations={"hodei.io/supervision": supervision}, containerStatuses=[container], conditions=conditions
    )


@pytest.mark.parametrize(
    ("ran_s", "ready", "since_s", "health", "stopped"),
    [
        pytest.param(5, False, 5, "", False, id="no probe yet"),
        pytest.param(12, False, 12, "failing", False, id="one failure"),
        pytest.param(30, False, 30, "failing", False, id="two failures, third probe running"),
        pytest.param(31, False, 31, "failing", True, id="never healthy"),
        pytest.param(31, False, None, "failing", True, id="never healthy, no condition"),
        pytest.param(900, True, 900, "ok", False, id="healthy"),
        pytest.param(900, False, 3, "failing", False, id="after a restart of the kubelet"),
        pytest.param(900, False, 11, "failing", True, id="failing long enough"),
    ],
)
def test_a_run_is_unhealthy_when_its_probe_has_failed_for_long_enough(ran_s, ready, since_s, health, stopped):
    pod = a_probed_pod(ran_s, ready, since_s)
    assert observe_pod(pod, NOW_MS).health == health
    ending = health_failure(pod, NOW_MS)
    assert (ending is not None) == stopped
    if ending is not None:
        assert (ending.code, ending.reason) == ("unhealthy", "its health check failed 3 times in a row")


@pytest.mark.parametrize("supervision", ["", "{", '{"file":"/x"}', '{"health":{"file":"/beat","every_ms":10}}'])
def test_a_pod_without_a_probe_is_never_unhealthy(supervision):
    pod = a_probed_pod(9000, False, 9000, supervision)
    assert (observe_pod(pod, NOW_MS).health, health_failure(pod, NOW_MS)) == ("", None)


def test_a_pod_under_deletion_is_not_stopped_for_its_health():
    pod = a_pod(running(), deletion_requested_ms=RECENTLY_MS, annotations={"hodei.io/supervision": EVERY_10_S})
    assert health_failure(pod, NOW_MS) is None


def test_a_failed_checkpoint_is_part_of_the_stop_reason():
    pod = a_pod(
        ended(143), deletion_requested_ms=RECENTLY_MS, ending='{"reason":"drained","note":"no checkpoint was seen"}'
    )
    assert observe_pod(pod, NOW_MS).reason == "drained; no checkpoint was seen"
