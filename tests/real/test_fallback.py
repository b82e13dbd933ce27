"""A real server with a hodei.yaml: while a backend of the fallback chain hangs, the next one runs its jobs.

Both backends here are agents on this machine; one of them is stopped with SIGSTOP.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_host import agent_pid
from real.installation import Installation, until

pytestmark = pytest.mark.real

HODEI_YAML = """\
backends:
  local: {kind: local, enabled: false}
health: {timeout: 1s, failures: 1, pause: 1s, max_pause: 1s}
scheduler:
  queue_strategy: {Priority: {with_preemption: true, max_queue_time: 1h}}
  parallel_scheduling: 10
  backends:
    - {type: local, name: onprem}
    - {type: local, name: cloud}
  policies:
    fallback_enabled: true
    health_check_interval: 1s
"""


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    installation = Installation(tmp_path / "home")
    installation.home.mkdir(parents=True, exist_ok=True)
    (installation.home / "hodei.yaml").write_text(HODEI_YAML)
    try:
        yield installation
    finally:
        installation.close()


def state_of(installation: Installation, name: str) -> str:
    return next((b.state for b in installation.client().backends() if b.name == name), "")


def backend_of_a_new_job(installation: Installation) -> str:
    id = installation.submit("/bin/true")
    (detail,) = installation.ended(id)
    assert detail.job.state == "succeeded"
    return detail.runs[-1].backend


def test_a_backend_that_hangs_is_replaced_by_the_next_of_the_chain_until_it_recovers(
    installation: Installation,
) -> None:
    installation.up()
    for name in ("onprem", "cloud"):
        until(lambda name=name: state_of(installation, name) == "ok", f"{name} is ok")
    assert backend_of_a_new_job(installation) == "onprem"
    pid = agent_pid(installation.home / "backends" / "onprem")
    assert pid
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state_of(installation, "onprem") == "unhealthy", "the hang is noticed")
    assert backend_of_a_new_job(installation) == "cloud"
    os.kill(pid, signal.SIGCONT)
    until(lambda: state_of(installation, "onprem") == "ok", "the backend is ok again")
    assert backend_of_a_new_job(installation) == "onprem"
    assert "max_queue_time" in installation.ok("job", "show", "1", "-o", "json").out


def test_a_mistake_in_hodei_yaml_is_reported_with_its_line_and_prevents_the_start(
    installation: Installation,
) -> None:
    (installation.home / "hodei.yaml").write_text(HODEI_YAML.replace("parallel_scheduling", "paralel_scheduling"))
    refused = installation.hodei("up", "--port", "0")
    assert refused.code == 2
    assert "line 6: scheduler.paralel_scheduling: unknown key" in refused.err
