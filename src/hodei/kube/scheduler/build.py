"""Options to objects: a pod scheduler for one cluster, with nothing begun yet."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from hodei.control.accounting.config import accounts_policy
from hodei.control.admission.gate import AdmissionPolicy
from hodei.control.controller import Controller
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.control.lifecycle.retry import Backoff, RetryPolicy
from hodei.control.queue.backfill import BackfillQueue
from hodei.kube.api.client import Api
from hodei.kube.scheduler.cache import ClusterCache
from hodei.kube.scheduler.explain import PodExplainer
from hodei.kube.scheduler.loop import SchedulerLoop
from hodei.kube.scheduler.messages import LATEST, Messages
from hodei.kube.scheduler.metrics import Metrics
from hodei.kube.scheduler.pod_api import PodApi
from hodei.kube.scheduler.pod_reader import SERVICES_LAST_MS, Reader, Reading
from hodei.kube.scheduler.pods import Pods
from hodei.kube.scheduler.profile import LINE, live_profile
from hodei.kube.scheduler.refused_objects import Refusals
from hodei.kube.scheduler.reservations import Reserved
from hodei.kube.scheduler.status_reporter import StatusReporter
from hodei.model.config import SchedulingConfig
from hodei.runtime.clock import SystemClock
from hodei.wiring import make_estimator

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


def make_controller(config: SchedulingConfig, tries: int = _TRIES_PER_STEP) -> Controller:
    """`tries`: how many pods or gangs are tried in one step; 0 for one that only looks."""
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
    return controller


class PodSchedulerParts(Struct):
    """All parts of it. Whoever only looks needs no driver."""

    controller: Controller
    around: ClusterCache
    pods: Pods
    explaining: PodExplainer
    metrics: Metrics
    refusals: Refusals
    timed: bool = False  # whether starts are promised


def furnish(options: Options, tries: int = _TRIES_PER_STEP) -> PodSchedulerParts:
    clock = SystemClock()
    controller = make_controller(options.scheduling, tries)
    around = ClusterCache(
        priority_annotation=options.priority_annotation, priority_preferred=options.priority_preferred
    )  # fmt: skip
    controller.world.table.residents.projects = around.projects
    controller.preempting.guard = around.budgets
    timed = any(isinstance(line, BackfillQueue) for line in controller.lines.values())
    reader = Reader(around, Reading(LINE, options.one_pod_per_node, SERVICES_LAST_MS if timed else 0))
    reader.refusals = refusals = Refusals()
    pods = Pods(options.scheduler_name, around, reader, clock.now_ms)
    pods.learns = controller.estimator.learns
    pods.tied = controller.preempting.tie
    explaining = PodExplainer(controller, options.words or LATEST)
    explaining.name_of = pods.name_of
    metrics = Metrics(options.scheduler_name)
    metrics.refusals = refusals
    return PodSchedulerParts(controller, around, pods, explaining, metrics, refusals, timed)


def make_driver(api: Api, house: PodSchedulerParts, options: Options) -> SchedulerLoop:
    actor = PodApi(api, options.scheduler_name, reports=options.events)
    telling = StatusReporter(house.controller, house.pods, actor, house.explaining)
    clock = SystemClock()
    driver = SchedulerLoop(api, house.controller, house.pods, house.around, actor, telling, house.metrics, clock.now_ms)
    house.refusals.told = driver.tell_refused
    return driver
