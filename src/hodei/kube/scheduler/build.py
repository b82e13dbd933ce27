"""Options to objects: a pod scheduler for one cluster, with nothing begun yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from hodei.control.accounting.accounts import accounts_policy
from hodei.control.admission.gate import AdmissionPolicy
from hodei.control.controller import Controller
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.control.lifecycle.retry import Backoff, RetryPolicy
from hodei.control.queue.backfill import BackfillQueue
from hodei.engine.profile import Profile
from hodei.engine.topology_index import AssumedVolumes
from hodei.kube.api.client import Api
from hodei.kube.api.quantities import UNSAID
from hodei.kube.scheduler.cache import ClusterCache, Refusals
from hodei.kube.scheduler.loop import SchedulerLoop
from hodei.kube.scheduler.messages import LATEST, Messages, PodExplainer
from hodei.kube.scheduler.metrics import Metrics
from hodei.kube.scheduler.pod_api import PodApi
from hodei.kube.scheduler.pod_reader import SERVICES_LAST_MS, Reader, Reading
from hodei.kube.scheduler.pods import Pods
from hodei.kube.scheduler.reservations import Reserved
from hodei.kube.scheduler.status_reporter import StatusReporter
from hodei.kube.scheduler.translate import CORDON_TAINT
from hodei.model.config import ProfileConfig, SchedulingConfig
from hodei.plugins.registry import build_profile, implied_plugins, queue_options
from hodei.plugins.volumes import Volumes
from hodei.runtime.clock import SystemClock
from hodei.wiring import make_estimator

WEIGHTS = {
    "taints": 3,
    "affinity": 2,
    "spread": 2,
    "job_affinity": 2,
    "fit": 1,
    "balanced_allocation": 1,
    "image_locality": 1,
}
# The one line that pods wait in.
LINE = "default"
# What pods have no words for: where a job may run, and parts of devices.
_UNUSED = ("platform", "devices", "overcommit", "workload", "distribution")


def kube_profile(
    name: str = LINE,
    *,
    queue: str = "priority",
    queue_arguments: Mapping[str, Any] | None = None,
    weights: Mapping[str, int] = WEIGHTS,
    arguments: Mapping[str, Mapping[str, Any]] | None = None,
    plugins: tuple[str, ...] = (),
    disabled: tuple[str, ...] = (),
) -> Profile:
    """`arguments`: what single plugins are told besides (`{"affinity": {"added": ...}}`)."""
    told = {"health": {"cordon_taint": CORDON_TAINT}, **(arguments or {})}
    return build_profile(
        name,
        queue=queue,
        queue_arguments=queue_arguments,
        plugins=("volumes", *plugins),
        disabled=(*_UNUSED, *disabled),
        scores=dict(weights),
        arguments=told,
    )


def live_profile(config: SchedulingConfig) -> Profile:
    """That of a live cluster, with what the operator says of the profile `default`."""
    wanted = config.profiles.get(LINE, ProfileConfig())
    options = {**wanted.options, "fit": {"assumed": UNSAID, **wanted.options.get("fit", {})}}
    return kube_profile(
        queue=wanted.queue,
        queue_arguments=queue_options(wanted),
        weights=WEIGHTS if wanted.scores is None else wanted.scores,
        arguments=options,
        plugins=(*wanted.plugins, *implied_plugins(config, wanted)),
        disabled=wanted.disable,
    )


def assumed_in(controller: Controller) -> AssumedVolumes:
    """The free volumes that decisions have given to claims; of nobody if the plugin is switched off."""
    for plugin in controller.engine.profiles[LINE].filters:
        if isinstance(plugin, Volumes):
            return plugin.assumed
    return AssumedVolumes()


# A pod that could not be bound is tried again for as long as it is there.
_FOR_EVER = 1 << 30
# Few, so that requests go out between the decisions.
_TRIES_PER_STEP = 32


class Options(Struct, frozen=True):
    scheduler_name: str = "hodei"
    events: Literal["all", "failures"] = "all"
    priority_annotation: str = ""
    one_pod_per_node: bool = False
    scheduling: SchedulingConfig = SchedulingConfig()
    words: Messages | None = None  # None: those of the release that the cluster runs
    reserved: tuple[Reserved, ...] = ()
    forecast_annotation: bool = False
    usage_configmap: str = "hodei-usage"
    priority_preferred: bool = False
    namespace: str = ""  # our own, for what is kept; "": that of the account


class PodSchedulerParts(Struct):
    """All parts of it. Whoever only looks needs no driver."""

    controller: Controller
    cache: ClusterCache
    pods: Pods
    explainer: PodExplainer
    metrics: Metrics
    refusals: Refusals
    timed: bool = False  # whether starts are promised


def build_scheduler(options: Options, tries: int = _TRIES_PER_STEP) -> PodSchedulerParts:
    """`tries`: how many pods or gangs are tried in one step; 0 for one that only looks."""
    clock = SystemClock()
    config = options.scheduling
    controller = Controller(
        {LINE: live_profile(config)},
        retry=RetryPolicy(failed_start=Backoff(1000, 2, 10_000, 100), max_losses=_FOR_EVER),
        admission=AdmissionPolicy("wait"),
        preemption=PreemptionPolicy(config.preemption.enabled, max_per_job=_FOR_EVER, by="number"),
        estimator=make_estimator(config.estimates),
        accounts=accounts_policy(config),
        max_tries=tries,
    )
    controller.evictions.enabled = False  # the cluster's own controller sends pods away for taints
    cache = ClusterCache(
        priority_annotation=options.priority_annotation, priority_preferred=options.priority_preferred
    )  # fmt: skip
    controller.cluster.table.topology_index.projects = cache.projects
    controller.preemption.guard = cache.budgets
    timed = any(isinstance(line, BackfillQueue) for line in controller.queues.values())
    reader = Reader(cache, Reading(LINE, options.one_pod_per_node, SERVICES_LAST_MS if timed else 0))
    reader.refusals = refusals = Refusals()
    pods = Pods(options.scheduler_name, cache, reader, clock.now_ms)
    pods.learns = controller.estimator.learns
    pods.tied = controller.preemption.link
    explainer = PodExplainer(controller, options.words or LATEST)
    explainer.name_of = pods.name_of
    metrics = Metrics(options.scheduler_name)
    metrics.refusals = refusals
    return PodSchedulerParts(controller, cache, pods, explainer, metrics, refusals, timed)


def make_driver(api: Api, scheduler: PodSchedulerParts, options: Options) -> SchedulerLoop:
    actor = PodApi(api, options.scheduler_name, reports=options.events)
    telling = StatusReporter(scheduler.controller, scheduler.pods, actor, scheduler.explainer)
    clock = SystemClock()
    driver = SchedulerLoop(
        api, scheduler.controller, scheduler.pods, scheduler.cache, actor, telling, scheduler.metrics, clock.now_ms,
        assumed_in(scheduler.controller),
    )  # fmt: skip
    scheduler.refusals.told = driver.tell_refused
    return driver
