"""The usage of a container from the stats of its daemon."""

from __future__ import annotations

import pytest

from hodei.backends.docker.runs import usage_of
from hodei.model.usage import RunUsage

CPU = {"cpu_usage": {"total_usage": 2_500_000_000}}


@pytest.mark.parametrize(
    ("stats", "usage"),
    [
        (
            {
                "cpu_stats": CPU,
                "memory_stats": {"usage": 500, "stats": {"inactive_file": 100}},
                "blkio_stats": {
                    "io_service_bytes_recursive": [
                        {"op": "read", "value": 7}, {"op": "write", "value": 3}, {"op": "read", "value": 1},
                    ]
                },
            },
            RunUsage(2500, 400, 8, 3),
        ),
        (
            {
                "cpu_stats": CPU,
                "memory_stats": {"usage": 500, "max_usage": 900},
                "blkio_stats": {"io_service_bytes_recursive": [{"op": "Read", "value": 7}, {"op": "Total", "value": 7}]},
            },
            RunUsage(2500, 900, 7),
        ),
        ({"cpu_stats": CPU, "blkio_stats": {"io_service_bytes_recursive": None}}, RunUsage(2500)),
        ({"cpu_stats": {"cpu_usage": {"total_usage": 0}}, "memory_stats": {}}, None),
        ({}, None),
    ],
    ids=["cgroup 2", "cgroup 1", "without memory and I/O", "ended", "empty"],
)  # fmt: skip
def test_stats_become_usage_and_missing_values_stay_unknown(stats, usage):
    assert usage_of(stats) == usage
