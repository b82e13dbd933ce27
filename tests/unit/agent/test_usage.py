"""Measurements of runs from control groups, /proc and the kernel's account of ended processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hodei.agent import usage
from hodei.agent.run import Run
from hodei.agent.spawn import Status, read_status
from hodei.agent.usage import UsageMeter, merge, of_groups, of_process, of_sessions


def write(group: Path, **files: str) -> str:
    group.mkdir(exist_ok=True)
    for name, text in files.items():
        (group / name.replace("__", ".")).write_text(text)
    return str(group)


def test_a_group_of_version_2_has_everything(tmp_path):
    group = write(
        tmp_path / "g",
        cpu__stat="usage_usec 1999999\nuser_usec 1500000\n",
        memory__peak="209715200\n",
        io__stat="8:0 rbytes=100 wbytes=5 rios=1 wios=1\n8:16 rbytes=11 wbytes=0\n",
    )
    assert of_groups([group]) == {
        "cpu_ms": 1999, "peak_memory": 209715200, "read_bytes": 111, "write_bytes": 5,
    }  # fmt: skip


def test_groups_of_version_1_are_read_from_each_hierarchy(tmp_path):
    cpu = write(tmp_path / "cpu", cpu__stat="nr_periods 0\n", cpuacct__usage="2500000000\n")
    memory = write(tmp_path / "memory", memory__max_usage_in_bytes="4096\n")
    assert of_groups([cpu, memory]) == {"cpu_ms": 2500, "peak_memory": 4096}


@pytest.mark.parametrize("text", ["", "\n", "max\n", "-5\n", "usage_usec\n", "usage_usec x\n", "9" * 30, "\0\0"])
def test_what_cannot_be_read_is_absent(tmp_path, text):
    group = write(tmp_path / "g", cpu__stat=text, memory__peak=text, cpuacct__usage=text, io__stat="")
    assert of_groups([group, str(tmp_path / "absent")]) == {}


@given(st.binary(max_size=100))
def test_garbage_in_a_group_never_fails(tmp_path_factory, data):
    group = tmp_path_factory.mktemp("group")
    for name in ("cpu.stat", "memory.peak", "cpuacct.usage", "io.stat"):
        (group / name).write_bytes(data)
    assert all(isinstance(amount, int) and amount >= 0 for amount in of_groups([str(group)]).values())


def test_the_larger_amounts_count():
    assert merge({"cpu_ms": 5, "peak_memory": 9}, {"cpu_ms": 7, "read_bytes": 0}) == {
        "cpu_ms": 7, "peak_memory": 9, "read_bytes": 0,
    }  # fmt: skip


def test_a_peak_that_is_not_above_that_of_the_agent_is_unknown():
    pid = os.posix_spawn("/bin/true", ["true"], {})
    used = os.wait4(pid, 0)[2]
    assert "peak_memory" not in of_process(used, usage.own_peak() + (4 << 20))
    assert of_process(used, 0)["peak_memory"] == used.ru_maxrss << 10
    assert of_process(used, 0)["cpu_ms"] >= 0


BURN = """
import os, sys
block = bytearray(100 << 20)
child = os.fork()
if child == 0:
    while os.times().user + os.times().system < 0.3: pass
    os._exit(0)
os.waitpid(child, 0)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_session_is_measured_with_the_children_that_it_has_waited_for():
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        used = of_sessions({process.pid})[process.pid]
        assert 280 <= used["cpu_ms"] < 3000
        assert 100 << 20 <= used["peak_memory"] < 160 << 20
        assert of_sessions(()) == {}
    finally:
        process.communicate()
    assert of_sessions({process.pid}) == {}


def test_a_sample_counts_until_the_end_of_a_run_and_is_not_repeated_at_once(monkeypatch):
    run, scans = Run("i", "1.0.1", "/d"), []
    monkeypatch.setattr(usage, "of_sessions", lambda pids: scans.append(set(pids)) or {7: {"cpu_ms": 90}})
    meter = UsageMeter({7: run})
    meter.sample_if_due()
    meter.sample()
    meter.sample_if_due()
    assert scans == [{7}]
    assert meter.measure_end(run, None) == {"cpu_ms": 90}


def status_of(directory: Path, data: bytes) -> Status:
    (directory / "status").write_bytes(b"7.0.1 pid 5 5\n" + data)
    return read_status("7.0.1", str(directory))


@pytest.mark.parametrize(
    ("data", "cpu_ms"),
    [
        pytest.param(b"0m0.010s 0m0.020s\n1m2.5s 0m0.25s\n7.0.1 exit 13 13\n", 30 + 62_500 + 250, id="dash"),
        pytest.param(b"0m0,000s 0m0,000s\n0m1,234567s 0m0,000s\n7.0.1 exit 13 13\n", 1234, id="a decimal comma"),
        pytest.param(b"7.0.1 exit 13 13\n", None, id="a wrapper of an older agent"),
        pytest.param(b"0m1.000s 0m0.000s\n7.0.1 exit 13 13\n", None, id="half of it"),
        pytest.param(b"0m1.0s 0m0.0s\n0m1.0s 0m0.0s\n8.0.1 exit 0 0\n7.0.1 exit 13 13\n", None, id="another run"),
    ],
)
def test_the_cpu_time_of_an_ended_command_is_in_its_status_file(tmp_path, data, cpu_ms):
    status = status_of(tmp_path, data)
    assert (status.cpu_ms, status.code, status.sound) == (cpu_ms, 13, True)


def test_cpu_time_without_an_end_does_not_count(tmp_path):
    status = status_of(tmp_path, b"0m1.000s 0m0.000s\n0m1.000s 0m0.000s\n")
    assert (status.cpu_ms, status.code, status.pid) == (None, None, 5)
