"""For all tests. In CI the generated cases are the same in every run, so that a red run means a changed program; on a
developer's machine they differ each time, and a failure prints how to repeat it."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

from docker_hosts import dockerd as dockerd  # a fixture
from slurm_cluster import slurm as slurm  # a fixture

# Whoever is started in the background may be deaf to Ctrl-C, and so would be all that tests start: some send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("ci", derandomize=True, print_blob=True)
settings.register_profile("here", print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Properties over whole stories take their time: they are not among the tests that are done in seconds."""
    for item in items:
        if "property" in item.path.parts:
            item.add_marker(pytest.mark.slow)
