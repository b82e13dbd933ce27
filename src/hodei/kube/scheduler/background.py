"""Which attendants a configuration calls for; a plain one needs only those for groups."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hodei.engine.fairness.billing import BILLING
from hodei.kube.api.client import Api
from hodei.kube.scheduler.background_task import BackgroundTask
from hodei.kube.scheduler.build import Options, PodSchedulerParts
from hodei.kube.scheduler.ended_members import EndedMembersInformer
from hodei.kube.scheduler.finished_pods import Finished, as_ran
from hodei.kube.scheduler.group_status_writer import GroupStatusWriter
from hodei.kube.scheduler.informers import WatchingJobs
from hodei.kube.scheduler.loop import SchedulerLoop
from hodei.kube.scheduler.pod_reader import Reader, Reading
from hodei.kube.scheduler.profile import LINE
from hodei.kube.scheduler.queue_status import QueueStatus
from hodei.kube.scheduler.reservations import Reservations
from hodei.kube.scheduler.usage_store import UsageStore
from hodei.model.facts import Fact, HistoryRestored
from hodei.model.job import JobSpec
from hodei.runtime.clock import SystemClock


def attendants_of(api: Api, house: PodSchedulerParts, options: Options, driver: SchedulerLoop) -> list[BackgroundTask]:
    """In the order in which they begin: first what is known of the past, then what is kept free, then the rest."""
    controller, pods, clock = house.controller, house.pods, SystemClock()
    out: list[BackgroundTask] = [
        WatchingJobs(api, house.around, house.refusals, pods.wants_jobs),
        EndedMembersInformer(api, options.scheduler_name, pods.past, pods.has_groups, driver.stir),
        GroupStatusWriter(api, options.scheduler_name, pods, house.around, time.time),
    ]
    if controller.accounts.sharing is not None and options.usage_configmap:
        only = None if options.scheduling.budgets else frozenset({BILLING})
        namespace = options.namespace or api.namespace or "default"
        out.append(
            UsageStore(
                api, namespace, options.usage_configmap, controller, clock.now_ms, only=only, monotonic=time.monotonic
            )
        )
    forecasting = None
    if options.forecast_annotation:
        from hodei.kube.scheduler.forecasts import PodForecasts  # with all that it takes, which nobody else needs

        forecasting = PodForecasts(api, controller, pods, clock, options.scheduling.forecast)
    if controller.estimator.learns or forecasting is not None:

        def learn(spec: JobSpec, ran_ms: int, ended_ms: int) -> None:
            if controller.estimator.learns:
                pods.give([HistoryRestored(ran=(as_ran(spec, ran_ms),))])
            if forecasting is not None:
                forecasting.learn(spec, ran_ms, ended_ms)

        reader = Reader(house.around, Reading(LINE, options.one_pod_per_node))
        finished = Finished(api, options.scheduler_name, reader, learn)
        finished.refusals = reader.refusals = house.refusals
        out.append(finished)
    if options.reserved:

        def tell(facts: Sequence[Fact]) -> None:
            pods.give(facts)
            driver.stir()

        out.append(Reservations(options.reserved, controller, pods.take_facts, tell, clock.now_ms, driver.decide))
    if house.timed:
        out.append(QueueStatus(controller, pods, house.explaining, driver.tell, clock.now_ms))
    if forecasting is not None:
        out.append(forecasting)
    return out
