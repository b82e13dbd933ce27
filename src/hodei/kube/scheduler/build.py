"""Builds the parts of a pod scheduler for one cluster; nothing is started."""

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
from hodei.kube.api.quantities import UNDECLARED
from hodei.kube.scheduler.cache import ClusterCache, Refusals
from hodei.kube.scheduler.loop import SchedulerLoop
from hodei.kube.scheduler.messages import LATEST, Messages, PodExplainer
from hodei.kube.scheduler.metrics import Metrics
from hodei.kube.scheduler.pod_api import PodApi
from hodei.kube.scheduler.pod_reader import LONG_RUNNING_MS, Reader, ReaderOptions
from hodei.kube.scheduler.pods import Pods
from hodei.kube.scheduler.reservations import ConfiguredReservation
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
# The profile of all pods.
PROFILE = "default"
# Plugins for features that pods do not have.
_DISABLED = ("platform", "devices", "overcommit", "workload", "distribution")


def kube_profile(
    name: str = PROFILE,
    *,
    queue: str = "priority",
    queue_arguments: Mapping[str, Any] | None = None,
    weights: Mapping[str, int] = WEIGHTS,
    arguments: Mapping[str, Mapping[str, Any]] | None = None,
    plugins: tuple[str, ...] = (),
    disabled: tuple[str, ...] = (),
) -> Profile:
    """`arguments`: further arguments of plugins (`{"affinity": {"added": ...}}`)."""
    plugin_arguments = {"health": {"cordon_taint": CORDON_TAINT}, **(arguments or {})}
    return build_profile(
        name,
        queue=queue,
        queue_arguments=queue_arguments,
        plugins=("volumes", *plugins),
        disabled=(*_DISABLED, *disabled),
        scores=dict(weights),
        arguments=plugin_arguments,
    )


def cluster_profile(config: SchedulingConfig) -> Profile:
    """The profile of a live cluster, with the operator's settings of the profile `default`."""
    wanted = config.profiles.get(PROFILE, ProfileConfig())
    options = {**wanted.options, "fit": {"assumed": UNDECLARED, **wanted.options.get("fit", {})}}
    return kube_profile(
        queue=wanted.queue,
        queue_arguments=queue_options(wanted),
        weights=WEIGHTS if wanted.scores is None else wanted.scores,
        arguments=options,
        plugins=(*wanted.plugins, *implied_plugins(config, wanted)),
        disabled=wanted.disable,
    )


def assumed_volumes(controller: Controller) -> AssumedVolumes:
    """The free volumes that decisions have given to claims; none if the plugin is disabled."""
    for plugin in controller.engine.profiles[PROFILE].filters:
        if isinstance(plugin, Volumes):
            return plugin.assumed
    return AssumedVolumes()


# A pod that cannot be bound is retried as long as it exists.
_UNLIMITED = 1 << 30
# Few, so that bindings are sent between decisions.
_TRIES_PER_STEP = 32


class Options(Struct, frozen=True):
    scheduler_name: str = "hodei"
    events: Literal["all", "failures"] = "all"
    priority_annotation: str = ""
    one_pod_per_node: bool = False
    scheduling: SchedulingConfig = SchedulingConfig()
    messages: Messages | None = None  # None: those of the cluster's release
    reservations: tuple[ConfiguredReservation, ...] = ()
    forecast_annotation: bool = False
    usage_configmap: str = "hodei-usage"
    priority_preferred: bool = False
    namespace: str = ""  # for the usage ConfigMap; "": the account's own


class PodSchedulerParts(Struct):
    """Without a loop, for commands that only read."""

    controller: Controller
    cache: ClusterCache
    pods: Pods
    explainer: PodExplainer
    metrics: Metrics
    refusals: Refusals
    uses_start_reservations: bool = False  # whether a queue makes start reservations


def build_scheduler(options: Options, tries: int = _TRIES_PER_STEP) -> PodSchedulerParts:
    """`tries`: pods and gangs tried per step; 0 to decide nothing."""
    clock = SystemClock()
    config = options.scheduling
    controller = Controller(
        {PROFILE: cluster_profile(config)},
        retry=RetryPolicy(failed_start=Backoff(1000, 2, 10_000, 100), max_losses=_UNLIMITED),
        admission=AdmissionPolicy("wait"),
        preemption=PreemptionPolicy(config.preemption.enabled, max_per_job=_UNLIMITED, by="number"),
        estimator=make_estimator(config.estimates),
        accounts=accounts_policy(config),
        max_tries=tries,
    )
    controller.evictions.enabled = False  # Kubernetes' own controller evicts pods for taints
    cache = ClusterCache(
        priority_annotation=options.priority_annotation, priority_preferred=options.priority_preferred
    )  # fmt: skip
    controller.cluster.table.topology_index.projects = cache.projects
    controller.preemption.guard = cache.budgets
    uses_start_reservations = any(isinstance(queue, BackfillQueue) for queue in controller.queues.values())
    reader = Reader(
        cache, ReaderOptions(PROFILE, options.one_pod_per_node, LONG_RUNNING_MS if uses_start_reservations else 0)
    )
    reader.refusals = refusals = Refusals()
    pods = Pods(options.scheduler_name, cache, reader, clock.now_ms)
    pods.observe_starts = controller.estimator.learns
    pods.link_members = controller.preemption.link
    explainer = PodExplainer(controller, options.messages or LATEST)
    explainer.name_of = pods.name_of
    metrics = Metrics(options.scheduler_name)
    metrics.refusals = refusals
    return PodSchedulerParts(controller, cache, pods, explainer, metrics, refusals, uses_start_reservations)


def make_loop(api: Api, scheduler: PodSchedulerParts, options: Options) -> SchedulerLoop:
    pod_api = PodApi(api, options.scheduler_name, events=options.events)
    reporter = StatusReporter(scheduler.controller, scheduler.pods, pod_api, scheduler.explainer)
    clock = SystemClock()
    loop = SchedulerLoop(
        api, scheduler.controller, scheduler.pods, scheduler.cache, pod_api, reporter, scheduler.metrics, clock.now_ms,
        assumed_volumes(scheduler.controller),
    )  # fmt: skip
    scheduler.refusals.on_new = loop.report_refused_object
    return loop
