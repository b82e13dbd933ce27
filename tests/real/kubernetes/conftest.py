"""A control plane per session, a namespace per test, and Hodei as the pod scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from real.kubernetes import binaries
from real.kubernetes.cluster import Cluster
from real.kubernetes.plane import Plane
from real.kubernetes.pod_scheduler import PodScheduler, PodSchedulers

_NUMBERS = count(1)


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """etcd, kube-apiserver, the controllers and kwok."""
    binaries.require()
    made = Plane(tmp_path_factory.mktemp("kubernetes") / "plane")
    try:
        made.start()
        made.controllers(ready=False)
        made.kwok()
        yield made
    finally:
        made.stop()


@pytest.fixture
def cluster(plane: Plane) -> Iterator[Cluster]:
    made = Cluster(plane, f"test-{next(_NUMBERS)}")
    try:
        yield made
    finally:
        plane.revive_apiserver()
        made.close()


@pytest.fixture
def hodei_kube(plane: Plane, tmp_path: Path) -> Iterator[PodSchedulers]:
    """`hodei_kube()` starts `hodei kube run`; after the test it must exit with 0 and have logged no Traceback."""
    made = PodSchedulers(plane, tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def hodei(plane: Plane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodScheduler]:
    """One `hodei kube run` per file, for pods of the scheduler `hodei`: a start takes seconds."""
    made = PodSchedulers(plane, tmp_path_factory.mktemp("hodei"))
    try:
        yield made()
    finally:
        made.close()


@pytest.fixture(scope="module")
def kube_scheduler(plane: Plane) -> Iterator[str]:
    """A real kube-scheduler for pods of `default-scheduler`; its scheduler name."""
    plane.kube_scheduler()
    try:
        yield "default-scheduler"
    finally:
        plane.stop_kube_scheduler()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Add the last output of the processes to the report of a failed test."""
    report = yield
    if report.failed:
        for fixture in getattr(item, "funcargs", {}).values():
            if isinstance(fixture, PodSchedulers):
                for one in fixture.started:
                    report.sections.append((f"hodei kube run: {one.log}", one.output(80)))
            elif isinstance(fixture, PodScheduler):
                report.sections.append((f"hodei kube run: {fixture.log}", fixture.output(80)))
            elif isinstance(fixture, Plane):
                for log in fixture.logs():
                    report.sections.append((str(log), fixture.output(log.stem, 8)))
    return report
