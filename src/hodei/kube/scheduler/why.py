"""`hodei kube why` and `hodei kube plan`: the live cluster is read once, the real scheduler is asked, and nothing is touched.

It needs no scheduler of ours to run there: whoever may read the cluster can ask, also about pods of another scheduler.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from hodei.control.explain.why import why
from hodei.kube.api.client import Access, Api, ApiError
from hodei.kube.api.objects import Pod, decode
from hodei.kube.scheduler.build import Options, PodSchedulerParts, build_scheduler
from hodei.kube.scheduler.groups import Entry
from hodei.kube.scheduler.informers import Informers
from hodei.kube.scheduler.plan import Planned, plan_all, read_manifests, with_priorities
from hodei.kube.scheduler.pod_reader import NODES_PATH, PODS_PATH, Reader, Reading
from hodei.kube.scheduler.reservations import Reservations
from hodei.kube.scheduler.run import connected
from hodei.model.errors import InvalidInput, NotFound
from hodei.model.explanation import Explanation
from hodei.runtime.clock import SystemClock

_PATIENCE_S = 60.0
_STEPS = 100
_JOB = re.compile(r"\bjob (\d+)")


class Answer(Struct, omit_defaults=True):
    """What is said of one pod, or of all pods of a workload. `message`: as its condition would say it; `explanation`: with
    the evidence. `names`: the pods that are jobs of these numbers in it. `unread`: what may not be read, and is missing in
    the answer.

    Of a workload (`kind`): of its `total` pods so many would start `now`, on these `nodes`; so many would take the place
    of others; so many would wait. The explanation is that of the first that would not start now."""

    pod: str
    scheduler: str = ""
    node: str = ""
    message: str = ""
    explanation: Explanation | None = None
    names: dict[str, str] = {}
    unread: list[str] = []
    kind: str = ""
    note: str = ""
    total: int = 0
    now: int = 0
    preempting: int = 0
    waiting: int = 0
    nodes: dict[str, int] = {}


async def look_why(access: Access, options: Options, namespace: str, name: str) -> Answer:
    """Whoever may read the pod gets an answer; what else may not be read is named in it."""
    async with connected(access) as api:
        pod = await _pod(api, namespace, name)
        options = structs.replace(options, scheduler_name=pod.spec.scheduler_name or options.scheduler_name)
        scheduler, lacking = await _read(api, options, namespace)
    entry = scheduler.pods.find(namespace, name)
    answer = Answer(f"{namespace}/{name}", pod.spec.scheduler_name, pod.spec.node_name, unread=lacking)
    if pod.spec.node_name:
        phase = f", {pod.status.phase.lower()}" if pod.status.phase else ""
        answer.message, answer.unread = f"it is on node {pod.spec.node_name}{phase}", []
    elif pod.over or pod.leaving:
        answer.message = "it is being deleted" if pod.leaving else f"it is over: {pod.status.phase}"
        answer.unread = []
    elif entry is not None and entry.wanted.gates:
        answer.message = f"held back by its scheduling gates: {', '.join(entry.wanted.gates)}"
    elif any(path.startswith((NODES_PATH, PODS_PATH)) for path in lacking):
        own = entry is not None and entry.reasons and all(reason.kind != "volume" for reason in entry.reasons)
        answer.message = scheduler.explainer.aside(entry.reasons).message if entry and own else _last_told(pod)
    elif entry is None:
        answer.message = "it is not known to be waiting; look again"
    elif entry.reasons:
        answer.message = scheduler.explainer.aside(entry.reasons).message
    else:
        _explain(scheduler, entry, answer)
    return answer


def _last_told(pod: Pod) -> str:
    """Without nodes nothing can be tried; what the scheduler itself said last can still be told."""
    told = pod.condition("PodScheduled")
    if told is None or not told.message:
        return "it waits, and its scheduler has not said why yet"
    return f"its scheduler said last: {told.reason}: {told.message}"


async def look_ahead(access: Access, options: Options, files: list[Path]) -> list[Answer]:
    """One answer for each workload, about all of its pods."""
    async with connected(access) as api:
        manifests = read_manifests(files, api.namespace or "default")
        await with_priorities(api, manifests)
        scheduler, lacking = await _read(api, options)
    _need(lacking, "/api/v1/nodes", "/api/v1/pods")
    reader = Reader(scheduler.cache, Reading(one_per_node=options.one_pod_per_node))
    return [_answer(one, options, lacking) for one in plan_all(scheduler, reader, manifests, SystemClock().now_ms())]


def _answer(planned: Planned, options: Options, lacking: list[str]) -> Answer:
    workload, meta = planned.workload, planned.workload.pod.metadata
    answer = Answer(f"{meta.namespace}/{meta.name}", options.scheduler_name, explanation=planned.first, unread=lacking)
    answer.message = planned.refused
    if workload.kind != "Pod":
        answer.kind, answer.note = workload.kind, workload.note
        answer.total, answer.now, answer.nodes = planned.total, planned.now, planned.nodes
        answer.preempting, answer.waiting = planned.preempting, planned.waiting
    return answer


async def _pod(api: Api, namespace: str, name: str) -> Pod:
    try:
        return decode(await api.request("GET", f"/api/v1/namespaces/{namespace}/pods/{name}"), Pod)
    except ApiError as error:
        if error.status == 404:
            hint = f"kubectl get pods -n {namespace}"
            raise NotFound(f"there is no pod {namespace}/{name}", hint=hint) from None
        raise


async def _read(api: Api, options: Options, namespace: str = "") -> tuple[PodSchedulerParts, list[str]]:
    """The cluster as it is now, with nothing decided; and the collections that may not be read. What may be read in
    `namespace` alone is read there."""
    scheduler = build_scheduler(options, tries=0)
    if scheduler.timed:
        scheduler = build_scheduler(
            options
        )  # who is promised what is known only once all have had their turn, here on paper
    informers = Informers.of(
        api, scheduler.pods, scheduler.cache, lambda: None, scheduler.refusals, lenient=True, within=namespace
    )
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await informers.start()
    except TimeoutError:
        problems = "; ".join(informers.problems) or "it takes too long"
        raise InvalidInput(f"the cluster cannot be read: {problems}", hint="kubectl auth can-i --list") from None
    finally:
        lacking = informers.denied
        await informers.stop()
    clock = SystemClock()
    if options.reserved:
        await Reservations(
            options.reserved, scheduler.controller, scheduler.pods.take_facts, scheduler.pods.give, clock.now_ms
        ).begin()  # fmt: skip
    scheduler.controller.step(clock.now_ms(), scheduler.pods.take_facts())
    for _ in range(_STEPS):
        due = scheduler.controller.next_wakeup_ms(clock.now_ms())
        if not scheduler.timed or due is None or due > clock.now_ms():
            break
        scheduler.controller.step(clock.now_ms(), [])
    return scheduler, lacking


def _need(lacking: list[str], *paths: str) -> None:
    for path in paths:
        if path in lacking:
            hint = "kubectl auth can-i --list; the role hodei-scheduler of deploy/kubernetes/rbac.yaml has all that it takes"
            raise InvalidInput(f"nothing can be planned: {path} may not be read", hint=hint)


def _explain(scheduler: PodSchedulerParts, entry: Entry, answer: Answer) -> None:
    controller, now_ms = scheduler.controller, SystemClock().now_ms()
    line = next((line for line in controller.queues.values() if entry.id in line.gangs), None)
    if line is None:
        if scheduler.timed and entry.id in controller.cluster.jobs:
            answer.message = "it could start now; its scheduler has not come to it yet"
        return
    gang = line.gangs[entry.id]
    answer.explanation = why(controller, entry.id, now_ms)
    answer.names = _names(scheduler, answer.explanation)
    result = controller.engine.place(gang, controller.view(now_ms))
    if isinstance(result, list):
        controller.engine.withdraw(gang, result)
        answer.message = "it could start now; its scheduler has not come to it yet"
    else:
        answer.message = scheduler.explainer.refused(gang, result, now_ms).message


def _names(scheduler: PodSchedulerParts, told: Explanation | None) -> dict[str, str]:
    """Here pods have numbers; people know them by their names."""
    said = {int(number) for number in _JOB.findall(msgspec.json.encode(told).decode())}
    said |= {hold.job for hold in told.held_for} if told is not None else set()
    return {str(number): name for number in sorted(said) if (name := scheduler.pods.name_of(number))}
