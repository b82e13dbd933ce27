"""A separate Slurm for tests that break it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from slurm_cluster import SlurmCluster, missing, running


@pytest.fixture(scope="module")
def own_slurm() -> Iterator[SlurmCluster]:
    if problem := missing():
        if os.environ.get("CI"):
            pytest.fail(problem)
        pytest.skip(problem)
    with running() as cluster:
        yield cluster
