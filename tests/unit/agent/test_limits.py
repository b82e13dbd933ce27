"""Cgroups in fake hierarchies: which one is chosen, and what is written to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hodei.agent import limits
from hodei.agent.limits import Cgroups, Limits, enforcement


@pytest.fixture
def v2(tmp_path, monkeypatch) -> Path:
    """A cgroup v2 tree in which a slice two levels up delegates memory and cpu."""
    monkeypatch.setattr(limits, "own_groups", lambda: {"": "/user.slice/session.scope"})
    (tmp_path / "user.slice" / "session.scope").mkdir(parents=True)
    for group, delegated in (("", "memory cpu"), ("user.slice", "memory cpu pids"), ("user.slice/session.scope", "")):
        (tmp_path / group / "cgroup.controllers").write_text("memory cpu pids")
        (tmp_path / group / "cgroup.subtree_control").write_text(delegated)
    (tmp_path / "user.slice" / "own").mkdir()
    (tmp_path / "user.slice" / "own" / "cgroup.subtree_control").write_text("")
    return tmp_path


def test_version_2_uses_the_nearest_group_that_delegates_its_controllers(v2):
    cgroups = Cgroups("own", v2)
    assert (cgroups.version, cgroups.parents["memory"]) == (2, v2 / "user.slice" / "own")


def test_version_2_writes_the_limits_of_a_run(v2):
    cgroups = Cgroups("own", v2)
    group = v2 / "user.slice" / "own" / "run"
    group.mkdir()
    for name in ("memory.max", "memory.swap.max", "cpu.max"):
        (group / name).touch()
    applied = cgroups.create("run", Limits(cpu_milli=1500, memory_bytes=1 << 30))
    assert applied.join == (f"{group}/cgroup.procs",)
    assert (applied.address_space_kib, applied.cpus) == (0, ())
    written = [(group / name).read_text() for name in ("memory.max", "memory.swap.max", "cpu.max")]
    assert written == [str(1 << 30), "0", "150000 100000"]


@pytest.mark.parametrize(("shares", "weight"), [(2, "1"), (1024, "39"), (262_144, "10000")])
def test_version_2_writes_the_weight_of_a_run_as_the_kubelet_does(v2, shares, weight):
    group = v2 / "user.slice" / "own" / "run"
    group.mkdir()
    (group / "cpu.weight").touch()
    applied = Cgroups("own", v2).create("run", Limits(cpu_shares=shares, oom_score_adj=1000))
    assert applied == limits.SpawnLimits((str(group),), oom_score_adj=1000)
    assert (group / "cpu.weight").read_text() == weight


def test_without_any_hierarchy_memory_becomes_an_address_space_limit(tmp_path):
    cgroups = Cgroups("own", tmp_path)
    applied = cgroups.create("run", Limits(memory_bytes=64 << 20))
    assert (cgroups.version, applied.groups, applied.address_space_kib) == (0, (), 64 << 10)
    assert enforcement(tmp_path) == {"memory": "rlimit", "cpu": "affinity", "processes": "group"}


def test_a_run_without_limits_gets_no_cgroup(v2):
    assert Cgroups("own", v2).create("run", Limits()) == limits.SpawnLimits()


@pytest.mark.parametrize(
    ("requested", "pinned"),
    [
        pytest.param((2, 0), (0, 2), id="all exist"),
        pytest.param((2, 9), (2,), id="some exist"),
        pytest.param((8, 9), (), id="none exists"),
    ],
)
def test_a_run_is_pinned_to_its_cores_that_exist_on_this_host(tmp_path, monkeypatch, requested, pinned):
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert Cgroups("own", tmp_path).create("run", Limits(cpu_milli=1000, cpus=requested)).cpus == pinned


@pytest.mark.parametrize(
    ("name", "text", "exceeded"),
    [
        ("memory.events", "low 0\noom 3\noom_kill 1\n", True),
        ("memory.events", "low 0\noom 3\noom_kill 0\n", False),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", True),
        ("other", "", False),
    ],
)
def test_running_out_of_memory_is_read_from_the_kernel_counter(tmp_path, name, text, exceeded):
    (tmp_path / name).write_text(text)
    assert Cgroups.ran_out_of_memory([str(tmp_path)]) is exceeded
