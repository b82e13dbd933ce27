"""A backend that lacks a capability does not get jobs that need it, and the reason names the capability."""

from __future__ import annotations

from typing import Any

import pytest

from builders import a_job_spec, a_node
from hodei.backends.docker.backend import CAPABILITIES as DOCKER
from hodei.backends.hpc.pbs import capabilities as pbs
from hodei.backends.hpc.slurm import capabilities as slurm
from hodei.backends.instant import InstantBackend
from hodei.backends.kubernetes.backend import CAPABILITIES as KUBERNETES
from hodei.backends.local import LocalBackend
from hodei.engine.view import Member
from hodei.model.backend import NEEDS, needs_of, unmet_by
from hodei.model.job import Checkpoint, GangRules, HealthCheck, Interactive
from hodei.plugins.capabilities import Capabilities
from unit.plugins.plugin_helpers import a_member, a_table, refused

# One job for each need, without other needs than those that follow from it.
JOBS: dict[str, dict[str, Any]] = {
    "images": {"image": "busybox"},
    "bare": {},
    "health_checks": {"health": HealthCheck(command=("/bin/true",))},
    "checkpoint": {"checkpoint": Checkpoint(signal="USR1")},
    "checkpoint_commands": {"checkpoint": Checkpoint(command=("/bin/save",))},
    "gpu_shares": {"gpu": "500m"},
    "limits": {"limits": {"memory": 1 << 30}},
    "per_node": {"gang": GangRules(per_node=True)},
    "idle_timeouts": {"workload": Interactive(60_000)},
}
KINDS = {
    "local": LocalBackend.capabilities,
    "docker": DOCKER,
    "kubernetes": KUBERNETES,
    "slurm": slurm("placed", "commands"),
    "slurm-rest": slurm("placed", "rest"),
    "slurm-delegate": slurm("delegate", "commands"),
    "pbs": pbs("delegate"),
    "instant": InstantBackend.capabilities,
}


def test_there_is_a_job_for_every_need():
    assert JOBS.keys() == NEEDS.keys()
    for need, fields in JOBS.items():
        assert need in needs_of(*_job_and_task(fields))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("need", NEEDS)
def test_a_node_is_refused_exactly_if_its_backend_lacks_a_needed_capability(kind: str, need: str):
    cannot = unmet_by(KINDS[kind])
    table = a_table([a_node("a", backend="able"), a_node("n", backend=kind, cannot=cannot)])
    member = a_member(**JOBS[need])
    found = refused(Capabilities(), member, table)
    assert all(nodes == ["n"] for nodes in found.values())
    assert bool(found) == bool(set(needs_of(member.job, member.task)) & set(cannot))
    if need in cannot and not (need == "checkpoint_commands" and "checkpoint" in cannot):
        assert f"BACKEND_CANNOT: backend {kind} cannot {NEEDS[need].what}" in found


def test_what_each_kind_cannot_do():
    assert {
        kind: set(unmet_by(can)) for kind, can in KINDS.items() if kind in ("local", "docker", "slurm", "instant")
    } == {
        "local": {"images"},
        "docker": {"bare"},
        "slurm": {"images", "health_checks", "gpu_shares", "idle_timeouts"},
        "instant": set(),  # the fake can do everything
    }
    assert {"checkpoint_commands"} == set(unmet_by(KINDS["slurm-rest"])) - set(unmet_by(KINDS["slurm"]))


def test_every_need_has_a_hint():
    assert all(need.hint and need.what for need in NEEDS.values())


def test_members_with_different_needs_have_different_keys():
    keys = {Capabilities().key(a_member(**fields)) for fields in JOBS.values()}
    assert len(keys) == len(JOBS)


def test_droppable_needs_are_suggested():
    table = a_table([a_node("n", backend="hpc", cannot=("health_checks", "checkpoint", "checkpoint_commands"))])
    plugin = Capabilities()
    one = a_member(**JOBS["health_checks"])
    assert [change.text for change in plugin.suggest(one, table.view(), None)] == ["drop health"]
    with_command = a_member(**JOBS["checkpoint_commands"])
    assert [change.text for change in plugin.suggest(with_command, table.view(), None)] == ["drop checkpoint"]
    both = a_member(a_job_spec("both", **JOBS["health_checks"], **JOBS["checkpoint"]))
    assert list(plugin.suggest(both, table.view(), None)) == []  # neither alone helps


def _job_and_task(fields: dict[str, Any]) -> tuple[Any, Any]:
    member: Member = a_member(**fields)
    return member.job, member.task
