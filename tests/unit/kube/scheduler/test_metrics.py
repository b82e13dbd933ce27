"""Numbers that dashboards of kube-scheduler read, after things that really happened in the controller."""

from __future__ import annotations

import asyncio

from unit.kube.scheduler.test_removals import Driven


def test_a_preemption_counts_with_its_victims():
    async def story() -> bytes:
        driven = Driven()
        driven.cluster.node("a", cpu="3")
        for name in ("low-1", "low-2", "low-3"):
            await driven.bound(name)
        driven.cluster.now_ms += 1000
        driven.cluster.pod("high", cpu="2", priority=1000)
        await driven.settle()
        return driven.cluster.parts.metrics.render()

    lines = asyncio.run(story()).decode().splitlines()
    assert "scheduler_preemption_attempts_total 1.0" in lines
    assert "scheduler_preemption_victims_sum 2.0" in lines
    assert "scheduler_preemption_victims_count 1.0" in lines
    assert 'scheduler_schedule_attempts_total{profile="hodei",result="unschedulable"} 1.0' in lines
