"""The capacity of the machine, under limits of its cgroups."""

from __future__ import annotations

import os
import re

import pytest

from hodei.agent import facts
from hodei.backends import machine


def test_the_machine_reports_its_capacity(tmp_path):
    capacity = machine.capacity(tmp_path)
    assert 0 < capacity["cpu"] <= len(os.sched_getaffinity(0)) * 1000
    assert capacity["memory"] > 0
    assert capacity["ephemeral-storage"] > 0


def test_limits_of_parent_cgroups_are_respected(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "own_groups", lambda: {"": "/a/b"})
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "a" / "b" / "cpu.max").write_text("max 100000\n")
    (tmp_path / "a" / "b" / "memory.max").write_text("1048576\n")
    capacity = machine.capacity(tmp_path, tmp_path)
    assert (capacity["cpu"], capacity["memory"]) == (500, 1048576)


def test_the_host_name_is_a_valid_name(monkeypatch):
    for name, expected in (("My_Host.local", "my-host.local"), ("---", "local"), ("a" * 80, "a" * 63)):
        monkeypatch.setattr(facts.socket, "gethostname", lambda name=name: name)
        assert machine.hostname() == expected
        assert re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", machine.hostname())


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        pytest.param(
            {"node0": "0-3,8-11", "node1": "4-7,12-15"}, [(0, 1, 8), (4,)], id="two sockets, some cores usable"
        ),
        pytest.param({"node10": "4-7", "node2": "0-3,8"}, [(0, 1, 8), (4,)], id="in numeric order"),
        pytest.param({"node0": "0-15", "node1": ""}, [(0, 1, 4, 8)], id="memory without cores"),
        pytest.param({"node0": "12-15", "node1": "0-8"}, [(0, 1, 4, 8)], id="no usable core in one"),
        pytest.param({}, [(0, 1, 4, 8)], id="no information"),
        pytest.param({"node0": "0-1"}, [(0, 1, 4, 8)], id="usable cores without a socket"),
        pytest.param({"node0": "nonsense,1-x,"}, [(0, 1, 4, 8)], id="malformed"),
    ],
)
def test_sockets_are_numa_nodes_with_the_usable_cores(tmp_path, monkeypatch, lists, expected):
    monkeypatch.setattr(facts.os, "sched_getaffinity", lambda _: {0, 1, 4, 8})
    for name, text in lists.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(f"{text}\n")
    assert [socket.cpus for socket in machine.sockets(tmp_path)] == expected


def test_the_cores_of_this_machine_are_each_in_one_socket():
    cpus = [cpu for socket in machine.sockets() for cpu in socket.cpus]
    assert sorted(cpus) == sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "count"),
    [
        pytest.param(["proc/driver/nvidia/gpus/0000:01:00.0", "proc/driver/nvidia/gpus/0000:02:00.0"], 2, id="driver"),
        pytest.param(["dev/nvidia0", "dev/nvidia1", "dev/nvidia2", "dev/nvidiactl", "dev/nvidia-uvm"], 3, id="devices"),
        pytest.param(["dev/null"], 0, id="none"),
    ],
)
def test_gpus_are_counted_by_their_driver(tmp_path, monkeypatch, files, count):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert machine.gpu_count(tmp_path) == count
    monkeypatch.setattr(machine, "gpu_count", lambda: count)
    assert machine.capacity(tmp_path).get("gpu") == (count * 1000 or None)


@pytest.mark.parametrize(
    ("driver", "tool", "output", "found"),
    [
        ("proc/driver/nvidia/gpus/0", "nvidia-smi", "NVIDIA A100-SXM4-40GB\nNVIDIA A100-SXM4-40GB\n", (2, "nvidia-a100-sxm4-40gb")),
        ("proc/driver/nvidia/gpus/0", "nvidia-smi", "NVIDIA A100\nNVIDIA T4\n", (2, "")),
        ("proc/driver/nvidia/gpus/0", "nvidia-smi", "", (1, "")),
        ("dev/kfd", "rocm-smi", "device,Card series\ncard0,AMD Instinct MI300X,x\n", (1, "amd-instinct-mi300x")),
        ("dev/null", "nvidia-smi", "NVIDIA T4\n", (0, "")),
    ],
    ids=["equal", "mixed", "a tool without an answer", "AMD", "no driver"],
)  # fmt: skip
def test_gpus_have_a_number_and_a_type(tmp_path, monkeypatch, driver, tool, output, found):
    for file in (driver, f"bin/{tool}"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / "bin" / tool).write_text(f"#!/bin/sh\nprintf '%s' '{output}'\n")
    (tmp_path / "bin" / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert machine.gpus(tmp_path) == found
