"""A real server with a hodei.yaml: when a backend of the fallback chain hangs, the next takes its work, and gives it back.

Both backends here are agents on this machine; a hang is an agent that is stopped with SIGSTOP.
"""

from __future__ import annotations

import contextlib
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
    made = Installation(tmp_path / "home")
    made.home.mkdir(parents=True, exist_ok=True)
    (made.home / "hodei.yaml").write_text(HODEI_YAML)
    try:
        yield made
    finally:
        for lock in (made.home / "backends").glob("*/lock"):
            if pid := agent_pid(lock.parent):
                os.kill(pid, signal.SIGCONT)
        if made.server is not None and made.server.poll() is None:
            made.stop()
        for lock in (made.home / "backends").glob("*/lock"):
            if pid := agent_pid(lock.parent):
                with contextlib.suppress(ProcessLookupError):  # it left by itself since we looked
                    os.kill(pid, signal.SIGTERM)
        made.close()


def state_of(installation: Installation, name: str) -> str:
    return next((b.state for b in installation.client().backends() if b.name == name), "")


def where(installation: Installation) -> str:
    id = installation.submit("/bin/true")
    (detail,) = installation.ended(id)
    assert detail.job.state == "succeeded"
    return detail.runs[-1].backend


def test_a_backend_that_hangs_is_replaced_by_the_next_of_the_chain_until_it_recovers(
    installation: Installation,
) -> None:
    installation.up()
    for name in ("onprem", "cloud"):
        until(lambda name=name: state_of(installation, name) == "ok" or None, f"{name} to be up")
    assert where(installation) == "onprem"
    pid = agent_pid(installation.home / "backends" / "onprem")
    assert pid
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state_of(installation, "onprem") == "unhealthy" or None, "the hang to be noticed")
    assert where(installation) == "cloud"
    os.kill(pid, signal.SIGCONT)
    until(lambda: state_of(installation, "onprem") == "ok" or None, "it to be well again")
    assert where(installation) == "onprem"
    assert "max_queue_time" in installation.ok("job", "show", "1", "-o", "json").out


def test_a_mistake_in_hodei_yaml_is_reported_with_its_line_and_prevents_the_start(
    installation: Installation,
) -> None:
    (installation.home / "hodei.yaml").write_text(HODEI_YAML.replace("parallel_scheduling", "paralel_scheduling"))
    said = installation.hodei("up", "--port", "0")
    assert said.code == 2
    assert "line 6: scheduler.paralel_scheduling: unknown key" in said.err
