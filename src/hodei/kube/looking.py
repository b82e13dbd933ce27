"""`hodei kube why` and `hodei kube plan`: the live cluster is read once, the real scheduler is asked, and nothing is touched.

It needs no scheduler of ours to run there: whoever may read the cluster can ask, also about pods of another scheduler.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import Struct, structs

from hodei.control.why import plan, why
from hodei.kube.entries import Entry
from hodei.kube.making import House, Options, furnish
from hodei.kube.reading import Reader, Reading
from hodei.kube.reservations import Reservations
from hodei.kube.run import connected
from hodei.kube.watching import Watching
from hodei.kubeapi.client import Access, Api, ApiError
from hodei.kubeapi.objects import Pod, decode, from_plain
from hodei.model.errors import InvalidInput, NotFound
from hodei.model.explanation import Explanation
from hodei.runtime.clock import SystemClock

_PATIENCE_S = 60.0
_STEPS = 100
_JOB = re.compile(r"\bjob (\d+)")
# Where kinds that make pods keep the template.
_TEMPLATES = {
    "Pod": (),
    "PodTemplate": ("template",),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
}
_USUAL = ("spec", "template")


class Answer(Struct, omit_defaults=True):
    """What is said of one pod. `message`: as its condition would say it; `explanation`: with the evidence. `names`: the
    pods that are jobs of these numbers in it."""

    pod: str
    scheduler: str = ""
    node: str = ""
    message: str = ""
    explanation: Explanation | None = None
    names: dict[str, str] = {}


async def look_why(access: Access, options: Options, namespace: str, name: str) -> Answer:
    async with connected(access) as api:
        pod = await _pod(api, namespace, name)
        options = structs.replace(options, scheduler_name=pod.spec.scheduler_name or options.scheduler_name)
        house = await _read(api, options)
    entry = house.pods.find(namespace, name)
    answer = Answer(f"{namespace}/{name}", pod.spec.scheduler_name, pod.spec.node_name)
    if pod.spec.node_name:
        phase = f", {pod.status.phase.lower()}" if pod.status.phase else ""
        answer.message = f"it is on node {pod.spec.node_name}{phase}"
    elif pod.over or pod.leaving:
        answer.message = "it is being deleted" if pod.leaving else f"it is over: {pod.status.phase}"
    elif entry is None:
        answer.message = "it is not known to be waiting; look again"
    elif entry.wanted.gates:
        answer.message = f"held back by its scheduling gates: {', '.join(entry.wanted.gates)}"
    elif entry.reasons:
        answer.message = house.explaining.aside(entry.reasons).message
    else:
        _explain(house, entry, answer)
    return answer


async def look_ahead(access: Access, options: Options, files: list[Path]) -> list[Answer]:
    wanted = [pod for file in files for pod in pods_in(file)]
    async with connected(access) as api:
        house = await _read(api, options)
        default = api.namespace or "default"
    reader = Reader(house.around, Reading(one_per_node=options.one_pod_per_node))
    out, now_ms = [], SystemClock().now_ms()
    for pod in wanted:
        meta = structs.replace(pod.metadata, namespace=pod.metadata.namespace or default)
        read = reader.pod(structs.replace(pod, metadata=meta), ours=True)
        answer = Answer(f"{meta.namespace}/{meta.name or '?'}", options.scheduler_name)
        if read.refused:
            answer.message = house.explaining.aside(read.refused).message
        else:
            (answer.explanation,) = plan(house.controller, [read.job], now_ms)
        out.append(answer)
    return out


def pods_in(file: Path) -> list[Pod]:
    """The pods that a manifest stands for; one for each workload, however many replicas it wants."""
    try:
        documents = list(yaml.safe_load_all(file.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidInput(f"cannot read {file}: {error}", hint="give a manifest of a pod or of a workload") from None
    out = []
    for number, document in enumerate(found for found in documents if found):
        if not isinstance(document, dict) or "kind" not in document:
            raise InvalidInput(f"{file}, document {number + 1}: not a Kubernetes object", hint="it needs a kind")
        for one in document.get("items") or [document] if document["kind"] == "List" else [document]:
            out += _pod_of(one, file)
    if not out:
        raise InvalidInput(f"{file} holds no pod and no workload", hint="a Pod, Deployment, Job, StatefulSet, ...")
    return out


def _pod_of(document: dict[str, Any], file: Path) -> list[Pod]:
    kind, template = document["kind"], document
    for step in _TEMPLATES.get(kind, _USUAL):
        template = template.get(step) if isinstance(template, dict) else None  # type: ignore[assignment]
    if not isinstance(template, dict) or not isinstance(template.get("spec"), dict):
        return []  # a Service or a ConfigMap beside it
    meta, own = dict(template.get("metadata") or {}), document.get("metadata") or {}
    meta = {"namespace": own.get("namespace", ""), "name": own.get("name") or own.get("generateName", ""), **meta}
    try:
        return [from_plain({"metadata": meta, "spec": template["spec"]}, Pod)]
    except Exception as error:
        raise InvalidInput(f"{file}: the {kind} cannot be read: {error}", hint="kubectl explain pod.spec") from None


async def _pod(api: Api, namespace: str, name: str) -> Pod:
    try:
        return decode(await api.request("GET", f"/api/v1/namespaces/{namespace}/pods/{name}"), Pod)
    except ApiError as error:
        if error.status == 404:
            hint = f"kubectl get pods -n {namespace}"
            raise NotFound(f"there is no pod {namespace}/{name}", hint=hint) from None
        raise


async def _read(api: Api, options: Options) -> House:
    """The cluster as it is now, with nothing decided."""
    house = furnish(options, tries=0)
    if house.timed:
        house = furnish(options)  # who is promised what is known only once all have had their turn, here on paper
    watching = Watching.of(api, house.pods, house.around, lambda: None, house.refusals)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await watching.start()
    except TimeoutError:
        problems = "; ".join(watching.problems) or "it takes too long"
        raise InvalidInput(f"the cluster cannot be read: {problems}", hint="kubectl auth can-i --list") from None
    finally:
        await watching.stop()
    clock = SystemClock()
    if options.reserved:
        await Reservations(
            options.reserved, house.controller, house.pods.take_facts, house.pods.give, clock.now_ms
        ).begin()  # fmt: skip
    house.controller.step(clock.now_ms(), house.pods.take_facts())
    for _ in range(_STEPS):
        due = house.controller.next_wakeup_ms(clock.now_ms())
        if not house.timed or due is None or due > clock.now_ms():
            break
        house.controller.step(clock.now_ms(), [])
    return house


def _explain(house: House, entry: Entry, answer: Answer) -> None:
    controller, now_ms = house.controller, SystemClock().now_ms()
    line = next((line for line in controller.lines.values() if entry.id in line.gangs), None)
    if line is None:
        if house.timed and entry.id in controller.world.jobs:
            answer.message = "it could start now; its scheduler has not come to it yet"
        return
    gang = line.gangs[entry.id]
    answer.explanation = why(controller, entry.id, now_ms)
    answer.names = _names(house, answer.explanation)
    result = controller.engine.place(gang, controller.view(now_ms))
    if isinstance(result, list):
        controller.engine.withdraw(gang, result)
        answer.message = "it could start now; its scheduler has not come to it yet"
    else:
        answer.message = house.explaining.refused(gang, result, now_ms).message


def _names(house: House, told: Explanation | None) -> dict[str, str]:
    """Here pods have numbers; people know them by their names."""
    said = {int(number) for number in _JOB.findall(msgspec.json.encode(told).decode())}
    said |= {hold.job for hold in told.held_for} if told is not None else set()
    return {str(number): name for number in sorted(said) if (name := house.pods.name_of(number))}
