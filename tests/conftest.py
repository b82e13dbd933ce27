"""Settings for all tests: fixtures of shared daemons, markers by component, and how tests are spread over workers.

In CI the generated cases are the same in every run, so a red run means a changed program. On a developer's machine they
differ each time, and a failure prints how to repeat it.
"""

from __future__ import annotations

import gc
import os
import signal

import pytest
from hypothesis import Phase, settings

from docker_hosts import dockerd as dockerd  # a fixture
from slurm_cluster import slurm as slurm  # a fixture

# A process started in the background may ignore Ctrl-C, and its children inherit that; some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# CI does not shrink a failing case, which takes minutes: the blob it prints repeats the case elsewhere.
settings.register_profile(
    "ci", derandomize=True, print_blob=True, phases=[Phase.explicit, Phase.reuse, Phase.generate], deadline=None
)
settings.register_profile("here", print_blob=True, deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")

# A daemon belongs to one worker: the tests that need it are one group of pytest-xdist (--dist loadgroup). What needs two
# daemons goes with the first of them in this order.
DAEMONS = {"slurm": ("slurm", "own_slurm"), "docker": ("dockerd",), "kubernetes": ("plane",), "metal": ("rack",)}
LEAVES_GARBAGE = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by the daemons they need, and group them so that each daemon starts once."""
    for item in items:
        folders = item.path.parts
        if "property" in folders:
            item.add_marker(pytest.mark.slow)
        needed = [name for name in DAEMONS if _needs(item, name)]
        for name in needed:
            item.add_marker(getattr(pytest.mark, name))
        if needed:
            item.add_marker(pytest.mark.xdist_group(needed[0]))
        if needed or item.get_closest_marker("real") or item.get_closest_marker("browser"):
            # Clients and helpers of these tests may leave sockets and pipes to the garbage collector.
            item.add_marker(pytest.mark.filterwarnings("default::ResourceWarning"))
            item.add_marker(pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning"))
            item.stash[LEAVES_GARBAGE] = True


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Collect what such a test leaves now: later it would fail a test that has nothing to do with it."""
    if LEAVES_GARBAGE in item.stash:
        gc.collect()


def _needs(item: pytest.Item, daemon: str) -> bool:
    folders = item.path.parts
    if "real" in folders and daemon in folders:
        return True
    return not set(getattr(item, "fixturenames", ())).isdisjoint(DAEMONS[daemon])
