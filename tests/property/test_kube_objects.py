"""No object stops the pod scheduler: whatever is in the cluster, the watches go on and a sane pod still finds its node.

The API server is played: it serves these objects and accepts every binding. What a real one accepts of them is shown in
tests/real/kubernetes/test_hostile_objects.py.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hodei.kube.scheduler.informers import Informers
from hodei.kube.scheduler.run import Options, background_tasks_for, build_scheduler, make_loop
from hodei.model.config import SchedulingConfig
from property.kube_objects import KINDS, PRIORITY, watched

# So many objects in all; HODEI_FUZZ_OBJECTS=50000 for the long run.
OBJECTS = int(os.environ.get("HODEI_FUZZ_OBJECTS", "1500"))
_EACH = 25
_HOUSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch": {"profiles": {"default": {"queue": "batch"}}},
    "shared": {
        "profiles": {"default": {"queue": "multifactor"}},
        "shares": {"enabled": True},
        "quotas": {"ns": {"hard": {"cpu": 8}, "cohort": "lab"}, "other": {"hard": {"cpu": 8}, "cohort": "lab"}},
    },
}


class PlayedApi:
    """Serves lists and watches of what it is given, and says yes to all else."""

    namespace, server = "ns", "played"

    def __init__(self, objects: list[tuple[str, bytes]]) -> None:
        half = len(objects) // 2
        self._listed, self._told = objects[:half], objects[half:]
        self.due_reports: list[tuple[str, bytes]] = []
        self.bound: dict[str, str] = {}
        self._more = asyncio.Event()

    async def request(self, method: str, path: str, body: bytes | None = None, **options: Any) -> bytes:
        if method == "POST" and path.endswith("/binding") and body is not None:
            self.bound[path.split("/")[-2]] = msgspec.json.decode(body)["target"]["name"]
        if method == "GET" and path in KINDS:
            items = b",".join(raw for at, raw in self._listed if at == path)
            return b'{"metadata":{"resourceVersion":"1"},"items":[' + items + b"]}"
        group = re.fullmatch(r"/apis/scheduling.k8s.io(/v1alpha2)?", path)
        if group and group[1]:
            return b'{"resources":[{"name":"podgroups","kind":"PodGroup"},{"name":"workloads","kind":"Workload"}]}'
        return b'{"versions":[{"version":"v1alpha2"}],"metadata":{"name":"x","uid":"u","resourceVersion":"1"}}'

    async def stream(self, path: str, params: Mapping[str, str], **options: Any) -> AsyncGenerator[list[bytes], None]:
        kinds = (b"ADDED", b"MODIFIED", b"DELETED")
        for number, (at, raw) in enumerate(self._told):
            if at == path:
                # The same object comes, changes and goes; some stay.
                for kind in kinds[: 1 + number % 4]:
                    yield [b'{"type":"' + kind + b'","object":' + raw + b"}"]
        while True:
            for at, raw in self.due_reports:
                if at == path:
                    yield [b'{"type":"ADDED","object":' + raw + b"}"]
            await self._more.wait()
            self._more = asyncio.Event()

    def bring(self, path: str, value: Any) -> None:
        self.due_reports.append((path, msgspec.json.encode(value)))
        self._more.set()

    async def close(self) -> None: ...


async def survive(api: PlayedApi, house_kind: str) -> None:
    options = Options(
        priority_annotation=PRIORITY, scheduling=msgspec.convert(_HOUSES[house_kind], SchedulingConfig),
        usage_configmap="",
    )  # fmt: skip
    harness = build_scheduler(options)
    loop = make_loop(api, harness, options)  # type: ignore[arg-type]
    loop.background_tasks = background_tasks_for(api, harness, options, loop)  # type: ignore[arg-type]
    informers = Informers(api, harness.pods, harness.cache, loop.wake, harness.refusals)  # type: ignore[arg-type]
    harness.metrics.informers = informers
    await asyncio.wait_for(informers.start(), 20)
    stopping = asyncio.Event()
    running = asyncio.create_task(loop.run(stopping))
    # A place that no garbage knows of, and a pod for it.
    mark = "sane.example.com/only"
    room = {"cpu": "1000", "memory": "1Ti", "pods": "10000"}
    api.bring("/api/v1/nodes", {
        "metadata": {"name": "sane-node", "uid": "sane-node", "labels": {mark: "yes"}},
        "spec": {"taints": [{"key": mark, "value": "yes", "effect": "NoSchedule"}]}, "status": {"allocatable": room},
    })  # fmt: skip
    api.bring("/api/v1/pods", {
        "metadata": {"name": "sane-pod", "namespace": "sane", "uid": "sane-pod"},
        "spec": {
            "schedulerName": "hodei", "priority": 2_000_000_000, "nodeSelector": {mark: "yes"}, "tolerations": [{"key": mark, "operator": "Exists"}],
            "containers": [{"name": "main", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}],
        },
    })  # fmt: skip
    try:
        async with asyncio.timeout(20):
            while api.bound.get("sane-pod") != "sane-node":
                dead = [task for task in (*informers.tasks, running) if task.done()]
                for task in dead:
                    task.result()
                assert not dead, "a task has ended"
                await asyncio.sleep(0.005)
        for attendant in loop.background_tasks:
            if hasattr(attendant, "check"):
                attendant.check()
        harness.metrics.render()
        assert [one.path for one in informers.reflectors if one.faults] == []  # none had to begin anew
    finally:
        stopping.set()
        await asyncio.gather(running, return_exceptions=True)
        await informers.stop()


def test_every_kind_that_is_watched_is_among_them() -> None:
    harness = build_scheduler(Options())
    informers = Informers(PlayedApi([]), harness.pods, harness.cache, lambda: None)  # type: ignore[arg-type]
    known = {re.sub(r"scheduling\.k8s\.io/v1alpha2", "scheduling.k8s.io", path) for path in KINDS}
    assert {one.path for one in informers.reflectors} == known


@pytest.mark.parametrize("kind", list(_HOUSES))
def test_no_object_stops_the_scheduler(kind: str) -> None:
    @settings(
        max_examples=max(OBJECTS // _EACH // len(_HOUSES), 1),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.lists(st.integers(0, 2**48), min_size=_EACH, max_size=_EACH, unique=True))
    def any_objects(seeds: list[int]) -> None:
        asyncio.run(survive(PlayedApi([watched(seed) for seed in seeds]), kind))

    any_objects()
