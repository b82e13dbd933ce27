"""What runs used, compared with what they requested."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import structs

from builders import NOW_MS, a_job_spec, a_run
from hodei.model.job import Run
from hodei.model.usage import Efficiency, RunUsage, cores_text, efficiency, size_text

GIB = 2**30


def ended(member: int = 0, *, ran_ms: int = 100_000, **usage: int) -> Run:
    times = {"started_ms": NOW_MS, "finished_ms": NOW_MS + ran_ms}
    return a_run(member=member, state="succeeded", usage=RunUsage(**usage), **times)


def test_efficiency_is_one_line_with_shares_of_the_request():
    spec = a_job_spec(cpu=8, memory="16Gi")
    run = ended(cpu_ms=110_000, peak_memory=19 * GIB // 10, read_bytes=32 * GIB // 10, write_bytes=120 * 2**20)
    found = efficiency(spec, [run], NOW_MS + 500_000)
    assert found is not None
    assert found.text == "used 1.1 of 8 cores (14 %), peak 1.9 of 16 GiB (12 %), read 3.2 GiB, wrote 120 MiB"
    assert found.hint == (
        "it used 1.1 of 8 cores on average and at most 1.9 of 16 GiB of memory; a smaller request can start sooner"
    )


def test_a_running_run_is_measured_up_to_now():
    run = a_run(state="running", started_ms=NOW_MS, usage=RunUsage(cpu_ms=5000))
    assert efficiency(a_job_spec(cpu=1), [run], NOW_MS + 10_000) == Efficiency(
        1, cpu_milli=500, cpu_request=1000, memory_request=a_job_spec(cpu=1).tasks[0].request.get("memory", 0)
    )


def test_members_add_up():
    spec = a_job_spec(cpu=2, memory="1Gi", count=2)
    runs = [ended(0, cpu_ms=100_000, peak_memory=GIB // 2), ended(1, cpu_ms=50_000, peak_memory=GIB // 4)]
    found = efficiency(spec, runs, 0)
    assert found is not None
    assert (found.cpu_milli, found.cpu_request) == (1500, 4000)
    assert (found.peak_memory, found.memory_request) == (3 * GIB // 4, 2 * GIB)


def test_what_is_unknown_is_left_out():
    assert efficiency(a_job_spec(), [a_run(state="running", started_ms=NOW_MS)], NOW_MS) is None
    found = efficiency(a_job_spec(), [ended(write_bytes=0)], NOW_MS)
    assert found is not None
    assert found.text == "wrote 0 bytes"


@pytest.mark.parametrize(
    ("request_", "ran_ms", "usage"),
    [
        ({"cpu": 8}, 59_000, {"cpu_ms": 1}),  # too short to tell
        ({"cpu": 8}, 100_000, {"cpu_ms": 200_000}),  # a quarter
        ({"cpu": 1, "memory": "256Mi"}, 100_000, {"cpu_ms": 1, "peak_memory": 1}),  # the default request
        ({"cpu": 8, "memory": "16Gi"}, 100_000, {"write_bytes": 1}),  # unknown
    ],
)
def test_no_hint_without_a_long_run_that_left_most_of_its_request(request_, ran_ms, usage):
    found = efficiency(a_job_spec(**request_), [ended(ran_ms=ran_ms, **usage)], 0)
    assert found is not None
    assert found.hint == ""


def test_the_hint_counts_the_member_that_used_most():
    spec = a_job_spec(cpu=4, count=2, memory="1Gi")
    idle, busy = ended(0, cpu_ms=0), ended(1, cpu_ms=400_000)
    assert efficiency(spec, [idle, busy], 0).hint == ""  # type: ignore[union-attr]
    half = structs.replace(busy, usage=RunUsage(cpu_ms=50_000))
    assert efficiency(spec, [idle, half], 0).hint.startswith("each of its runs used 0.5 of 4 cores")  # type: ignore[union-attr]


def test_the_larger_of_two_measurements_counts():
    last = RunUsage(cpu_ms=10, peak_memory=500)
    assert RunUsage(cpu_ms=20, peak_memory=300, read_bytes=7).merge(last) == RunUsage(20, 500, 7)
    assert last.merge(None) == last


def test_negative_amounts_cannot_be_read():
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"cpu_ms": -1}', type=RunUsage)


@pytest.mark.parametrize(
    ("amount", "text"), [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 KiB"), (28 << 20, "28 MiB"), (3 * GIB // 2, "1.5 GiB"), (2**62, "4096 PiB")]
)  # fmt: skip
def test_sizes(amount: int, text: str):
    assert size_text(amount) == text


def test_cores():
    assert cores_text(1000, 1000) == "1 of 1 core (100 %)"
    assert cores_text(30, 0) == "0.03 cores"
    assert cores_text(12_400, 16_000) == "12 of 16 cores (78 %)"
