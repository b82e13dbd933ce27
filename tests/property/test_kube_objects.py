"""No object stops the pod scheduler: whatever is in the cluster, the watches continue and a valid pod is bound.

A stand-in for the API server serves these objects and accepts every binding. tests/real/kubernetes/test_hostile_objects.py
shows which of them a real server accepts.
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
from property.kube_objects import KINDS, PRIORITY, random_object

# The number of objects in all; HODEI_FUZZ_OBJECTS=50000 for the long run.
OBJECTS = int(os.environ.get("HODEI_FUZZ_OBJECTS", "1500"))
_EACH = 25
_CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch": {"profiles": {"default": {"queue": "batch"}}},
    "shared": {
        "profiles": {"default": {"queue": "multifactor"}},
        "shares": {"enabled": True},
        "quotas": {"ns": {"hard": {"cpu": 8}, "cohort": "lab"}, "other": {"hard": {"cpu": 8}, "cohort": "lab"}},
    },
}


class StubApi:
    """Serves lists and watches of the given objects and accepts every other request."""

    namespace, server = "ns", "stub"

    def __init__(self, objects: list[tuple[str, bytes]]) -> None:
        half = len(objects) // 2
        self._listed, self._watched = objects[:half], objects[half:]
        self.later: list[tuple[str, bytes]] = []
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
        for number, (at, raw) in enumerate(self._watched):
            if at == path:
                # The same object is added, modified and deleted; some stay.
                for kind in kinds[: 1 + number % 4]:
                    yield [b'{"type":"' + kind + b'","object":' + raw + b"}"]
        while True:
            for at, raw in self.later:
                if at == path:
                    yield [b'{"type":"ADDED","object":' + raw + b"}"]
            await self._more.wait()
            self._more = asyncio.Event()

    def add(self, path: str, value: Any) -> None:
        self.later.append((path, msgspec.json.encode(value)))
        self._more.set()

    async def close(self) -> None: ...


async def run_scheduler(api: StubApi, config: str) -> None:
    options = Options(
        priority_annotation=PRIORITY, scheduling=msgspec.convert(_CONFIGS[config], SchedulingConfig),
        usage_configmap="",
    )  # fmt: skip
    scheduler = build_scheduler(options)
    loop = make_loop(api, scheduler, options)  # type: ignore[arg-type]
    loop.background_tasks = background_tasks_for(api, scheduler, options, loop)  # type: ignore[arg-type]
    informers = Informers(api, scheduler.pods, scheduler.cache, loop.wake, scheduler.refusals)  # type: ignore[arg-type]
    scheduler.metrics.informers = informers
    await asyncio.wait_for(informers.start(), 60)
    stopping = asyncio.Event()
    running = asyncio.create_task(loop.run(stopping))
    # A node that no random object refers to, and a pod for it.
    key = "valid.example.com/only"
    allocatable = {"cpu": "1000", "memory": "1Ti", "pods": "10000"}
    api.add("/api/v1/nodes", {
        "metadata": {"name": "valid-node", "uid": "valid-node", "labels": {key: "yes"}},
        "spec": {"taints": [{"key": key, "value": "yes", "effect": "NoSchedule"}]}, "status": {"allocatable": allocatable},
    })  # fmt: skip
    api.add("/api/v1/pods", {
        "metadata": {"name": "valid-pod", "namespace": "valid", "uid": "valid-pod"},
        "spec": {
            "schedulerName": "hodei", "priority": 2_000_000_000, "nodeSelector": {key: "yes"}, "tolerations": [{"key": key, "operator": "Exists"}],
            "containers": [{"name": "main", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}],
        },
    })  # fmt: skip
    try:
        async with asyncio.timeout(60):
            while api.bound.get("valid-pod") != "valid-node":
                ended = [task for task in (*informers.tasks, running) if task.done()]
                for task in ended:
                    task.result()
                assert not ended, "a task has ended"
                await asyncio.sleep(0.005)
        for task in loop.background_tasks:
            if hasattr(task, "check"):
                task.check()
        scheduler.metrics.render()
        assert [one.path for one in informers.reflectors if one.faults] == []  # no watch was restarted
    finally:
        stopping.set()
        await asyncio.gather(running, return_exceptions=True)
        await informers.stop()


def test_every_watched_kind_is_generated() -> None:
    scheduler = build_scheduler(Options())
    informers = Informers(StubApi([]), scheduler.pods, scheduler.cache, lambda: None)  # type: ignore[arg-type]
    known = {re.sub(r"scheduling\.k8s\.io/v1alpha2", "scheduling.k8s.io", path) for path in KINDS}
    assert {one.path for one in informers.reflectors} == known


@pytest.mark.parametrize("kind", list(_CONFIGS))
def test_no_object_stops_the_scheduler(kind: str) -> None:
    @settings(
        max_examples=max(OBJECTS // _EACH // len(_CONFIGS), 1),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.lists(st.integers(0, 2**48), min_size=_EACH, max_size=_EACH, unique=True))
    def any_objects(seeds: list[int]) -> None:
        asyncio.run(run_scheduler(StubApi([random_object(seed) for seed in seeds]), kind))

    any_objects()
