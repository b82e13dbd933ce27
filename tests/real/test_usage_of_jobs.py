"""What jobs use, through a whole server: live in `hodei top`, stored with the end, counted in the metrics."""

from __future__ import annotations

import pytest

from real.installation import Installation, until

pytestmark = pytest.mark.real
BURN = ("sh", "-c", "while :; do :; done")


def test_a_busy_run_is_first_in_top_and_its_usage_survives_its_end_and_a_restart(installation: Installation) -> None:
    installation.up()
    idle = installation.submit("sleep", "600", cpu="100m")
    busy = installation.submit(*BURN, cpu="500m")
    for job in (idle, busy):
        installation.until_state(job, "running")

    def busy_first() -> list[dict[str, int]] | None:
        rows = installation.ok("top", "-o", "json").json
        return rows if len(rows) == 2 and (rows[0]["cpu_ms"] or 0) >= 300 else None

    rows = until(busy_first, "the usage of the busy run")
    assert [row["job"] for row in rows] == [busy, idle]
    assert (rows[0]["cpu_request"], rows[1]["cpu_request"]) == (500, 100)
    assert rows[0]["cpu_milli"] > 10 * (rows[1]["cpu_milli"] or 0)
    live = installation.job(busy)
    assert live.runs[0].usage is not None
    assert live.efficiency is not None
    assert "of 0.5 cores" in installation.ok("job", "show", str(busy)).out

    installation.ok("cancel", str(busy), str(idle))
    [ended, _] = installation.ended(busy, idle)
    stored = ended.runs[0].usage
    assert stored is not None
    assert stored.cpu_ms is not None
    assert stored.cpu_ms >= rows[0]["cpu_ms"]
    metrics = installation.request("GET", "/metrics").body.decode()
    assert 'hodei_cpu_used_seconds_total{project="default"}' in metrics
    assert installation.ok("top", "-o", "json").json == []

    installation.kill()
    installation.up()
    assert installation.job(busy).runs[0].usage == stored
