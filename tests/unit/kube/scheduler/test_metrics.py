"""kube-scheduler's metrics after real decisions of the controller."""

from __future__ import annotations

import asyncio

from unit.kube.scheduler.test_removals import SchedulerRun


def test_a_preemption_counts_with_its_victims():
    async def run() -> bytes:
        scheduler = SchedulerRun()
        scheduler.cluster.node("a", cpu="3")
        for name in ("low-1", "low-2", "low-3"):
            await scheduler.bind(name)
        scheduler.cluster.now_ms += 1000
        scheduler.cluster.pod("high", cpu="2", priority=1000)
        await scheduler.settle()
        return scheduler.cluster.parts.metrics.render()

    lines = asyncio.run(run()).decode().splitlines()
    assert "scheduler_preemption_attempts_total 1.0" in lines
    assert "scheduler_preemption_victims_sum 2.0" in lines
    assert "scheduler_preemption_victims_count 1.0" in lines
    assert 'scheduler_schedule_attempts_total{profile="hodei",result="unschedulable"} 1.0' in lines
