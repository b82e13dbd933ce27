"""The simulated provider: what is paid for, what fails, and the rule that the planner is compared with."""

from __future__ import annotations

from hodei.control.capacity.scaling import CapacityPolicy, GroupPolicy
from hodei.model.job import JobSpec, TaskSpec
from hodei.model.node import Node
from hodei.sim.driver import Simulation
from hodei.sim.metrics import Result, summary
from hodei.sim.policies import policy
from hodei.sim.provider import Provider, ProviderPolicy, Strategy, node_per_job, plan_on_clone
from hodei.sim.traces import Workload
from hodei.sim.traces.workload import Arrival
from hodei.wiring import make_controller

SECOND, MINUTE, HOUR = 1000, 60_000, 3_600_000
BOOT_MS, STOP_MS, IDLE_MS = 2 * MINUTE, 20 * SECOND, 5 * MINUTE
INTERVAL_MS = 5 * SECOND
STEADY = ProviderPolicy(boot_jitter_percent=0)


def nodes(count: int, *, cpu: int = 4, group: str = "small", **fields) -> list[Node]:
    return [
        Node(f"{group or 'always'}-{number}", "sim", capacity={"cpu": cpu * 1000}, group=group, cost_milli=600,
             startup_ms=BOOT_MS, phase="potential" if group else "ready", **fields)
        for number in range(count)
    ]  # fmt: skip


def arrivals(*jobs: tuple[int, int, int]) -> Workload:
    """Each job: when it is submitted, its cpus, and how long it runs."""
    spec = {cpu: JobSpec(name="job", tasks=(TaskSpec(request={"cpu": cpu * 1000}),)) for _, cpu, _ in jobs}
    return Workload("few", [Arrival(at_ms, id, spec[cpu], run_ms) for id, (at_ms, cpu, run_ms) in enumerate(jobs, 1)])


def run(
    workload: Workload, offered: list[Node], how: ProviderPolicy = STEADY, strategy: Strategy = plan_on_clone, **group
) -> tuple[Result, Provider]:
    controller = make_controller(policy("easy"))
    settings = GroupPolicy(**{"idle_ms": IDLE_MS} | group)
    controller.scaling.policy = CapacityPolicy(interval_ms=INTERVAL_MS, default=settings)
    provider = Provider(offered, how, strategy)
    return Simulation(workload, controller, offered, provider=provider).run(), provider


def test_a_node_is_paid_from_its_order_until_it_has_stopped():
    result, provider = run(arrivals((0, 4, 10 * MINUTE)), nodes(3))
    used = provider.used
    assert (used.started, used.busy_ms, used.allocated_ms) == (1, 10 * MINUTE, 10 * MINUTE)
    assert used.paid_ms == BOOT_MS + 10 * MINUTE + IDLE_MS + STOP_MS
    assert used.longest_idle_ms == IDLE_MS
    assert used.cost_milli == -(-600 * used.paid_ms // HOUR)
    assert summary(result)["wasted_hours"] == (used.paid_ms - 10 * MINUTE) / HOUR
    assert result.outcomes[0].wait_ms == INTERVAL_MS + BOOT_MS, "planned at the first interval"
    assert [counts for _, *counts in used.changes] == [[0, 0], [1, 0], [1, 1], [1, 0], [0, 0]]


def test_nodes_without_a_group_are_paid_from_beginning_to_end():
    _, provider = run(arrivals((0, 4, HOUR)), nodes(2, group=""))
    used = provider.used
    assert (used.paid_ms, used.busy_ms, used.started) == (2 * HOUR, HOUR, 0)


def test_allocated_time_is_weighted_by_the_share_of_the_node():
    _, provider = run(arrivals((0, 1, HOUR), (0, 1, HOUR)), nodes(1))
    assert (provider.used.busy_ms, provider.used.allocated_ms) == (HOUR, HOUR // 2)


def test_jobs_end_although_boots_fail_and_orders_are_refused():
    jobs = arrivals(*((number * MINUTE, 4, 20 * MINUTE) for number in range(40)))
    how = ProviderPolicy(seed=3, failed_boots_percent=20, refused_percent=20)
    result, provider = run(jobs, nodes(20), how, boot_timeout_ms=4 * MINUTE, tries=1)
    assert len([o for o in result.outcomes if o.ended_ms > 0]) == 40
    assert provider.used.failed_boots > 0
    assert provider.used.refused > 0
    assert provider.used.longest_idle_ms <= IDLE_MS + INTERVAL_MS


def test_work_on_reclaimed_nodes_starts_again():
    jobs = arrivals(*((0, 4, 30 * MINUTE) for _ in range(20)))
    result, provider = run(jobs, nodes(20, spot=True, losses_milli=1_000_000), ProviderPolicy(seed=2))
    assert len([o for o in result.outcomes if o.ended_ms > 0]) == 20
    assert provider.used.reclaimed > 0
    assert sum(o.preemptions for o in result.outcomes) >= 1


def test_equal_seeds_give_equal_runs():
    jobs = arrivals(*((number * MINUTE, 2, 20 * MINUTE) for number in range(30)))
    how = ProviderPolicy(seed=5, failed_boots_percent=10)
    first, second = (run(jobs, nodes(10), how)[1].used for _ in range(2))
    assert first == second


def test_a_node_per_job_orders_more_than_the_planner():
    jobs = arrivals(*((0, 1, HOUR) for _ in range(8)))
    planned = run(jobs, nodes(10))[1].used
    plain = run(jobs, nodes(10), strategy=node_per_job)[1].used
    assert (planned.started, plain.started) == (2, 8)
    assert planned.cost_milli < plain.cost_milli
