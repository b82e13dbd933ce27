"""A control plane for the whole session, a namespace and nodes for each test, and Hodei as its pod scheduler."""

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
    binaries.need()
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
    """`hodei_kube()` starts `hodei kube run`; it must go with 0 and without a Traceback when the test is over."""
    made = PodSchedulers(plane, tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def hodei(plane: Plane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodScheduler]:
    """One `hodei kube run` for all tests of a file, for pods of the scheduler `hodei`: it takes seconds to start."""
    made = PodSchedulers(plane, tmp_path_factory.mktemp("hodei"))
    try:
        yield made()
    finally:
        made.close()


@pytest.fixture(scope="module")
def kube_scheduler(plane: Plane) -> Iterator[str]:
    """The real one, for pods of `default-scheduler`; its name."""
    plane.kube_scheduler()
    try:
        yield "default-scheduler"
    finally:
        plane.stop_kube_scheduler()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """A failed test shows what the processes said last."""
    report = yield
    if report.failed:
        for given in getattr(item, "funcargs", {}).values():
            if isinstance(given, PodSchedulers):
                for one in given.started:
                    report.sections.append((f"hodei kube run: {one.log}", one.said(80)))
            elif isinstance(given, PodScheduler):
                report.sections.append((f"hodei kube run: {given.log}", given.said(80)))
            elif isinstance(given, Plane):
                for log in given.logs():
                    report.sections.append((str(log), given.said(log.stem, 8)))
    return report
