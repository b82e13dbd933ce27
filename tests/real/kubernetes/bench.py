"""`make bench-kube`: Bindings per second and CPU cost of Hodei and kube-scheduler, one after the other on the same apiserver.

    python -m real.kubernetes.bench [--nodes 1000 5000] [--pods 5000] [--live 2000]

For each number of nodes it measures three things: Bindings per second that the apiserver accepts from a client that makes no
decisions (raw); each scheduler with all pods pending when it starts (backlog); and each with pods that are created while it runs
(live: the times from creation to binding). Rates are from the first to the last binding seen by a watch. Both schedulers may send
5,000 requests per second. CPU times come from /proc. All processes share the cores of this machine, also with the apiserver
and with this program.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from hodei.kube.api.client import Access, Api
from real.kubernetes.cluster import node, pod
from real.kubernetes.plane import Plane
from real.kubernetes.pod_scheduler import PodScheduler

NAMESPACE = "bench"
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
_TICKS = os.sysconf("SC_CLK_TCK")
_CONCURRENCY = 48


class _Name(Struct):
    name: str
    resource_version: str = msgspec.field(default="", name="resourceVersion")
    uid: str = ""


class _Spec(Struct):
    node_name: str = msgspec.field(default="", name="nodeName")


class _Pod(Struct):
    metadata: _Name
    spec: _Spec = msgspec.field(default_factory=_Spec)


class _Event(Struct):
    type: str
    object: _Pod


class _List(Struct):
    metadata: dict[str, Any]
    items: list[_Pod]


class Result(Struct):
    what: str
    pods: int
    seconds: float
    cpu_s: float
    memory_mb: int = 0
    p50_s: float = 0.0
    p99_s: float = 0.0

    @property
    def rate(self) -> float:
        return self.pods / self.seconds if self.seconds else 0.0

    @property
    def cpu_ms(self) -> float:
        return 1000 * self.cpu_s / self.pods


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def memory_mb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


async def each(items: Iterable[Any], do: Callable[[Any], Awaitable[object]], width: int = _CONCURRENCY) -> None:
    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:
            await do(item)

    await asyncio.gather(*(worker() for _ in range(width)))


class Bench:
    def __init__(self, plane: Plane, api: Api, folder: Path) -> None:
        self.plane, self.api, self.folder = plane, api, folder

    async def make_nodes(self, first: int, last: int) -> None:
        async def make(number: int) -> None:
            name = f"node-{number:05d}"
            wanted = node(name, "32", "256Gi", zone=f"zone-{number % 3}")
            await self.api.request("POST", "/api/v1/nodes", msgspec.json.encode(wanted))
            await self.api.request(
                "PATCH",
                f"/api/v1/nodes/{name}",
                b'{"spec":{"taints":null}}',
                content_type="application/merge-patch+json",
            )

        await each(range(first, last), make)

    async def make_pods(self, count: int, scheduler: str, prefix: str) -> dict[str, float]:
        """The creation time of each pod, by the clock of this process."""
        made: dict[str, float] = {}

        async def make(number: int) -> None:
            wanted = pod(f"{prefix}-{number:05d}", "100m", "500Mi", scheduler=scheduler, labels={"app": prefix})
            made[wanted["metadata"]["name"]] = time.monotonic()
            await self.api.request("POST", _PODS, msgspec.json.encode(wanted))

        await each(range(count), make)
        return made

    async def clear(self) -> None:
        found = msgspec.json.decode(await self.api.request("GET", _PODS), type=_List).items

        async def delete(one: _Pod) -> None:
            await self.api.request("DELETE", f"{_PODS}/{one.metadata.name}", b'{"gracePeriodSeconds":0}')

        await each(found, delete)
        await self.api.request("DELETE", f"/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events", timeout_s=120)

    async def bound(self, prefix: str, count: int, seen: Callable[[str, float], None], timeout_s: float = 600) -> None:
        """Wait until `count` pods with this prefix have a node. Calls `seen` with the name and time of each."""
        known: set[str] = set()
        decoder = msgspec.json.Decoder(_Event)
        async with asyncio.timeout(timeout_s):
            while len(known) < count:
                answer = await self.api.request("GET", _PODS, params={"resourceVersion": "0"})
                listed = msgspec.json.decode(answer, type=_List)
                now = time.monotonic()
                for one in listed.items:
                    if one.spec.node_name and one.metadata.name not in known and one.metadata.name.startswith(prefix):
                        known.add(one.metadata.name)
                        seen(one.metadata.name, now)
                params = {"watch": "true", "resourceVersion": listed.metadata["resourceVersion"]}
                async for lines in self.api.stream(_PODS, params):
                    now = time.monotonic()
                    for line in lines:
                        one = decoder.decode(line).object
                        if (
                            one.spec.node_name
                            and one.metadata.name not in known
                            and one.metadata.name.startswith(prefix)
                        ):
                            known.add(one.metadata.name)
                            seen(one.metadata.name, now)
                    if len(known) >= count:
                        return

    async def raw(self, count: int, nodes: int) -> Result:
        """Bindings without decisions and without Events."""
        await self.make_pods(count, "none", "raw")
        found = msgspec.json.decode(await self.api.request("GET", _PODS), type=_List).items

        async def bind(number: int) -> None:
            one = found[number].metadata
            target = {"apiVersion": "v1", "kind": "Node", "name": f"node-{number % nodes:05d}"}
            body = {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": one.name, "uid": one.uid},
                "target": target,
            }
            await self.api.request("POST", f"{_PODS}/{one.name}/binding", msgspec.json.encode(body))

        began, cpu = time.monotonic(), cpu_s(os.getpid())
        await each(range(len(found)), bind, 64)
        result = Result("raw", count, time.monotonic() - began, cpu_s(os.getpid()) - cpu)
        await self.clear()
        return result

    async def backlog(
        self, what: str, scheduler: str, count: int, start: Callable[[], object], pid_of: Callable[[], int]
    ) -> Result:
        """All pods exist before the scheduler starts."""
        await self.make_pods(count, scheduler, "backlog")
        times: list[float] = []
        cpu: list[float] = []

        def seen(name: str, at: float) -> None:
            if not times:
                cpu.append(cpu_s(pid_of()))
            times.append(at)

        waiting = asyncio.create_task(self.bound("backlog", count, seen))
        await asyncio.to_thread(start)
        await waiting
        pid = pid_of()
        result = Result(what, count, times[-1] - times[0], cpu_s(pid) - cpu[0], memory_mb(pid))
        await self._settled(scheduler, count, what)
        result.cpu_s = cpu_s(pid) - cpu[0]  # including the Events that were still queued
        await self.clear()
        return result

    async def live(self, what: str, scheduler: str, count: int, pid: int) -> Result:
        """Pods are created as fast as possible while the scheduler runs."""
        ends: dict[str, float] = {}
        waiting = asyncio.create_task(self.bound("live", count, lambda name, at: ends.setdefault(name, at)))
        await asyncio.sleep(0.5)  # the watch opens meanwhile; if it opens later, the first times are too long
        cpu = cpu_s(pid)
        made = await self.make_pods(count, scheduler, "live")
        await waiting
        took = sorted(ends[name] - made[name] for name in made)
        result = Result(what, count, max(ends.values()) - min(made.values()), cpu_s(pid) - cpu, memory_mb(pid))
        result.p50_s, result.p99_s = took[len(took) // 2], took[int(len(took) * 0.99)]
        await self._settled(scheduler, count, what)
        await self.clear()
        return result

    async def _settled(self, scheduler: str, count: int, what: str) -> None:
        """Wait until the scheduler has posted its Events, if it posts one per pod."""
        if "failures" in what:
            return
        for _ in range(240):
            path = f"/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events"
            found = msgspec.json.decode(await self.api.request("GET", path, params={"limit": "1"}))
            if 1 + int(found["metadata"].get("remainingItemCount", 0)) >= count:
                return
            await asyncio.sleep(0.25)
        print(f"  ({what}: fewer Events than pods after a minute)")


def report(results: list[Result], nodes: int, raw: Result) -> None:
    baseline = results[0]
    print(f"\n{nodes} nodes, {baseline.pods} pods pending; raw Bindings {raw.rate:.0f}/s")
    for one in results:
        ratio = f"{one.rate / baseline.rate:5.2f}x" if one is not baseline else "      "
        cpu = f"{one.cpu_ms / baseline.cpu_ms:5.2f}x" if one is not baseline else "      "
        late = f"  p50 {one.p50_s:.2f} s  p99 {one.p99_s:.2f} s" if one.p99_s else ""
        print(
            f"  {one.what:34s} {one.rate:6.0f} pods/s {ratio}  {100 * one.rate / raw.rate:3.0f} % of raw  "
            f"{one.cpu_ms:5.2f} ms CPU per pod {cpu}  {one.memory_mb} MB{late}",
            flush=True,
        )


async def measure(plane: Plane, folder: Path, args: argparse.Namespace) -> None:
    api = await Api.connect(Access(str(plane.kubeconfig("admin"))), connections=128)
    bench = Bench(plane, api, folder)
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    await api.request("POST", "/api/v1/namespaces", msgspec.json.encode(namespace))
    made = 0
    for nodes in sorted(args.nodes):
        await bench.make_nodes(made, nodes)
        made = nodes
        raw = await bench.raw(args.pods, nodes)
        backlog, live = [], []

        def pid_of_theirs() -> int:
            return plane.pid("kube-scheduler-theirs")

        if not args.ours_only:
            backlog.append(
                await bench.backlog(
                    "kube-scheduler", "theirs", args.pods, lambda: plane.kube_scheduler("theirs"), pid_of_theirs
                )
            )
            if args.live:
                live.append(await bench.live("kube-scheduler, live", "theirs", args.live, pid_of_theirs()))
            plane.stop_kube_scheduler("theirs")
        for events in ("all", "failures"):
            ours = PodScheduler(plane, folder, "ours", [f"--events={events}"], "hodei", False)

            def pid_of_ours(ours: PodScheduler = ours) -> int:
                assert ours.process is not None
                return ours.process.pid

            def start(ours: PodScheduler = ours) -> object:
                return ours.start(ready=False)

            backlog.append(await bench.backlog(f"hodei, events={events}", "ours", args.pods, start, pid_of_ours))
            assert ours.process is not None
            if args.live:
                live.append(await bench.live(f"hodei, events={events}, live", "ours", args.live, ours.process.pid))
            ours.process.send_signal(signal.SIGTERM)
            ours.process.wait(30)
            if args.verbose:
                print(ours.output())
        report(backlog, nodes, raw)
        if live:
            report(live, nodes, raw)
    await api.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-kube", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument("--pods", type=int, default=5000)
    parser.add_argument("--live", type=int, default=2000, help="pods created while the scheduler runs; 0 for none")
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("-v", "--verbose", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hodei-bench-") as folder:
        plane = Plane(Path(folder) / "plane")
        try:
            plane.start()
            asyncio.run(measure(plane, Path(folder), args))
        finally:
            plane.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
