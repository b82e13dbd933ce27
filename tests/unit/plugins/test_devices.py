"""Fragmented GPUs, bound cores, one socket: which nodes are refused, with which reason, and what would help."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from builders import NOW_MS, a_job, a_job_spec, a_node
from hodei.control.controller import Controller
from hodei.control.explain.why import why
from hodei.engine.cycle import Engine
from hodei.engine.explain import Change
from hodei.engine.plan import Refusal
from hodei.engine.points import NO_OPINION
from hodei.engine.runner import Runner
from hodei.engine.view import Member, View, gang_of
from hodei.model.facts import JobSubmitted, NodeJoined
from hodei.model.node import Grant, Socket
from hodei.plugins.devices import Devices
from hodei.plugins.registry import build_profile
from unit.plugins.plugin_helpers import VIEW, a_member, a_table, refused

SOCKETS = (Socket((0, 1), (0,)), Socket((2, 3), (1,)))


def _table(*nodes, held=()):
    """`held`: (node, grant, fields of the job that holds it)."""
    table = a_table(nodes)
    for name, grant, fields in held:
        member = a_member(**fields)
        table.place(table.row[name], member.task.request, member, grant)
    return table


def _halves(name="n1"):
    """Half of each of two GPUs is in use."""
    return [(name, Grant((), ((gpu, 500),)), {"gpu": "0.5"}) for gpu in (0, 1)]


def _refusals(member: Member, table) -> list[tuple[str, bool, list[str]]]:
    pairs = Runner().refusals(Devices(), member, table.view(), VIEW)
    return [(r.code, r.evictable, [table.names[i] for i in np.flatnonzero(mask)]) for mask, r in pairs if mask.any()]


def test_jobs_without_devices_or_binding_get_no_opinion():
    assert Devices().key(a_member(cpu="2")) == NO_OPINION
    assert Devices().filter(a_member(cpu="2"), a_table([a_node()]).view(), VIEW) == ()


def test_fragmented_gpus_are_refused_with_that_reason():
    table = _table(a_node("n1", gpu="2"), a_node("n2", gpu="2"), held=_halves())
    assert refused(Devices(), a_member(gpu="1"), table) == {"GPU_FRAGMENTED: GPUs are free only in pieces": ["n1"]}
    assert refused(Devices(), a_member(gpu="0.5"), table) == {}


def test_missing_amounts_are_reported_by_fit():
    table = _table(a_node("n1", gpu="2"), a_node("n2"), held=_halves())
    assert refused(Devices(), a_member(gpu="2"), table) == {}


@pytest.mark.parametrize(
    ("node", "fields", "evictable"),
    [
        ({"gpu": "2"}, {"gpu": "1"}, True),
        ({"gpu": "2", "overcommit_percent": {"gpu": 75}}, {"gpu": "1"}, False),
    ],
    ids=["whole after preemption", "never whole, because less than the capacity is allocatable"],
)
def test_preemption_helps_only_if_the_idle_node_would_fit(node, fields, evictable):
    table = _table(a_node("n1", **node), held=_halves()[:1] if not evictable else _halves())
    [(code, helps, _)] = _refusals(a_member(**fields), table)
    assert (code, helps) == ("GPU_FRAGMENTED", evictable)


@pytest.mark.parametrize(
    ("sockets", "fields", "held", "expected"),
    [
        ((), {"cpu": "1", "binding": "cores"}, (), ("NO_TOPOLOGY", False)),
        (SOCKETS, {"cpu": "3", "binding": "cores"}, ((0, 1),), ("NO_FREE_CORES", True)),
        (SOCKETS, {"cpu": "5", "binding": "cores"}, (), ("NO_FREE_CORES", False)),
        (SOCKETS, {"cpu": "2", "binding": "numa"}, ((0,), (2,)), ("NOT_IN_ONE_SOCKET", True)),
        (SOCKETS, {"cpu": "3", "binding": "numa"}, (), ("NOT_IN_ONE_SOCKET", False)),
        (SOCKETS, {"cpu": "1", "gpu": "2", "binding": "numa"}, (), ("NOT_IN_ONE_SOCKET", False)),
        (SOCKETS, {"cpu": "2", "gpu": "1", "binding": "numa"}, ((0,),), None),
        (SOCKETS, {"cpu": "3500m", "binding": "cores"}, (), None),
    ],
    ids=[
        "an unknown topology", "others hold them", "more than the node has", "one left in each socket",
        "more than a socket has", "GPUs in two sockets", "the other socket has all", "rounded up to all four",
    ],
)  # fmt: skip
def test_bound_cores(sockets, fields, held, expected):
    taken = [("n1", Grant(cpus), {"cpu": str(len(cpus)), "binding": "cores"}) for cpus in held]
    table = _table(a_node("n1", 8, gpu="2", sockets=sockets), held=taken)
    found = _refusals(a_member(**fields), table)
    assert [(code, helps) for code, helps, _ in found] == ([] if expected is None else [expected])


def test_the_shortage_lists_the_free_pieces():
    table = _table(a_node("n1", 8, gpu="2", sockets=SOCKETS), held=[*_halves(), ("n1", Grant((0,)), {"cpu": "1"})])
    assert Devices().lacks(a_member(gpu="1"), table.view(slice(0, 1)), VIEW) == (
        500, "its GPUs are free only in pieces (0.5, 0.5; 1 requested)",
    )  # fmt: skip
    size, text = Devices().lacks(a_member(cpu="4", binding="cores"), table.view(slice(0, 1)), VIEW)
    assert (size, text) == (250, "has 1 + 2 free cores in its sockets, 4 requested")
    assert Devices().lacks(a_member(gpu="0.5"), table.view(slice(0, 1)), VIEW) == (0, "")


def _suggestions(member: Member, table) -> list[Change]:
    return list(Devices().suggest(member, table.view(), VIEW))


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        ({"gpu": "0.9"}, "gpu 0.9 to 0.5"),
        ({"gpu": "1"}, "drop gpu 1"),
        ({"gpu": "0.9", "cpu": "3", "binding": "cores"}, "gpu 0.9 to 0.5, drop binding to cores"),
        ({"cpu": "4", "binding": "cores"}, "drop binding to cores, cpu 4 to 3"),
        ({"cpu": "3", "binding": "numa"},
         "drop binding to the cores of one socket, binding to any cores instead of those of one socket, cpu 3 to 2"),
    ],
    ids=["a smaller share", "no whole GPU is left", "either of two", "fewer cores", "any cores"],
)  # fmt: skip
def test_smaller_requests_that_fit_are_suggested(fields, change):
    table = _table(a_node("n1", 8, gpu="2", sockets=SOCKETS), held=[*_halves(), ("n1", Grant((0,)), {"cpu": "1"})])
    assert ", ".join(one.text for one in _suggestions(a_member(**fields), table)) == change


def _why(**fields):
    controller = Controller({"default": build_profile("default")})
    controller.step(NOW_MS, [NodeJoined(a_node("n1", 8, gpu="2", sockets=SOCKETS))])
    controller.step(NOW_MS, [JobSubmitted(a_job(i, gpu="0.6", cpu="100m")) for i in (1, 2)])
    controller.step(NOW_MS, [JobSubmitted(a_job(9, **fields))])
    return why(controller, 9, NOW_MS)


def test_why_names_the_pieces_and_a_suggestion_that_was_tried():
    explanation = _why(gpu="0.5", cpu="100m")
    assert explanation.code == "GPU_FRAGMENTED"
    assert [suggestion.change for suggestion in explanation.suggestions] == ["gpu 0.5 to 0.4"]
    assert "0.4, 0.4; 0.5 requested" in explanation.nearest.text


def test_why_names_the_binding_that_blocks():
    explanation = _why(cpu="5", binding="cores")
    assert explanation.code == "NO_FREE_CORES"
    assert [suggestion.change for suggestion in explanation.suggestions] == ["cpu 5 to 4", "drop binding to cores"]


def test_a_job_for_a_whole_gpu_preempts_only_the_jobs_that_share_one():
    controller = Controller({"default": build_profile("default")})
    controller.step(NOW_MS, [NodeJoined(a_node("n1", 8, gpu="2"))])
    controller.step(NOW_MS, [JobSubmitted(a_job(i, gpu="0.6", cpu="100m", priority="low")) for i in (1, 2)])
    plan = controller.step(NOW_MS + 1000, [JobSubmitted(a_job(9, gpu="1", cpu="100m", priority="high"))]).plan
    assert len(plan.evictions) == 1
    assert not plan.faults


def test_a_gang_shares_gpus_without_overlap():
    table = a_table([a_node("n1", 8, gpu="2"), a_node("n2", 8, gpu="1")])
    profile = build_profile("default")
    engine = Engine(table, {"default": profile})
    gang = gang_of(1, a_job_spec(gpu="0.4", cpu="100m", count=6), 0)
    profile.admit(gang)
    placed = engine.place(gang, View(0))
    assert not isinstance(placed, Refusal)
    taken: dict[tuple[str, int], int] = {}
    for one in placed:
        [(gpu, milli)] = one.grant.gpus
        taken[one.node.name, gpu] = taken.get((one.node.name, gpu), 0) + milli
    assert sorted(taken.values()) == [800, 800, 800]
    more = gang_of(2, structs.replace(gang.job, name="more"), 0)
    profile.admit(more)
    assert isinstance(engine.place(more, View(0)), Refusal)
    engine.undo(placed)
    assert table.gpus.tolist() == [[1000, 1000], [1000, -1]]
