"""Devices of kind `edge` with a real server: profiles, work that goes on while a device is offline, and slow logs."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from real.installation import Installation
from real.test_joined_hosts import Host, new_token

pytestmark = pytest.mark.real
CONFIG = """
[backends.local]
kind = "local"
enabled = false
[backends.field]
kind = "edge"
away_after = "1s"
[backends.field.profiles.camera]
battery = true
data = ["video-7"]
labels = { site = "north" }
offline_ok = "4h"
log_rate = "100Ki"
"""


@pytest.fixture
def device(installation: Installation) -> Iterator[Host]:
    installation.configure(CONFIG).up()
    host = Host(installation, "cam-1", 0, "--label", "hodei.io/profile=camera")
    host.start(new_token(installation, backend="field", node="cam-1"))
    host.until_state("ready")
    try:
        yield host
    finally:
        host.signal(signal.SIGCONT)
        host.close()


def test_a_device_has_what_its_profile_says(installation: Installation, device: Host) -> None:
    (node,) = installation.ok("nodes", "-o", "json").json
    assert node["data"] == ["video-7"]
    assert node["labels"]["site"] == "north"
    assert [taint["key"] for taint in node["taints"]] == ["hodei.io/battery"]


def test_a_job_on_a_silent_device_ends_with_its_own_code_when_the_device_is_back(
    installation: Installation, device: Host
) -> None:
    done = installation.home.parent / "done"
    job = installation.submit("sh", "-c", f"while [ ! -e {done} ]; do sleep 0.02; done; echo seen; exit 3")
    installation.until_state(job, "running")
    device.signal(signal.SIGSTOP)
    device.until_state("not-ready")
    done.touch()
    assert installation.job(job).job.state == "running", "nothing is known of it"
    device.signal(signal.SIGCONT)
    (ended,) = installation.ended(job)
    assert (ended.job.state, ended.job.exit_code, len(ended.runs)) == ("failed", 3, 1)
    assert installation.ok("logs", str(job)).out == "seen\n"


def test_a_log_is_fetched_at_the_rate_of_the_profile(installation: Installation, device: Host) -> None:
    job = installation.submit("python3", "-c", "print('x' * 299_999)")
    installation.ended(job)
    began = time.monotonic()
    assert len(installation.ok("logs", str(job)).out) == 300_000
    # Three parts: the first is free, and the others wait for their turn.
    assert time.monotonic() - began > 1.5
