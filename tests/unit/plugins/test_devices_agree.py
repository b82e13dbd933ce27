"""`devices`, which evaluates all nodes at once, agrees with the reference implementation, and with what a node then
grants.

Each case is a small random cluster in which members are placed, released and evaluated. `HODEI_CASES` sets how many.
"""

from __future__ import annotations

import os
import random

from builders import a_job_spec, a_node
from hodei.engine.device_slots import needs_devices
from hodei.engine.nodes import Table
from hodei.engine.ranking import Rankings
from hodei.engine.runner import Runner
from hodei.engine.view import Member, gang_of
from hodei.model.node import Grant, Node, Socket
from hodei.plugins.devices import Devices
from hodei.plugins.registry import build_profile
from unit.plugins import naive_devices as naive
from unit.plugins.plugin_helpers import VIEW

CASES = int(os.environ.get("HODEI_CASES", "600"))


def _node(dice: random.Random, number: int) -> Node:
    cores, gpus = dice.choice([2, 4, 8]), dice.choice([0, 0, 1, 2, 4])
    half = dice.randint(0, cores)
    first, second = tuple(range(gpus // 2)), tuple(range(gpus // 2, gpus))
    sockets = dice.choice(
        [
            (),
            (Socket(tuple(range(cores)), tuple(range(gpus))),),
            (Socket(tuple(range(half)), first), Socket(tuple(range(half, cores)), second)),
            (Socket(tuple(range(half)), first), Socket(tuple(range(half, cores)))),
        ]
    )
    amount = dice.choice([gpus, gpus, f"{gpus}.5"]) if gpus else ""
    percent = dice.choice([{}, {}, {"gpu": 150}, {"gpu": 80, "cpu": 200}])
    return a_node(f"n{number}", cores, "16Gi", gpu=amount, sockets=sockets, overcommit_percent=percent)


def _member(dice: random.Random) -> Member:
    spec = a_job_spec(
        cpu=dice.choice(["0", "500m", "1", "1500m", "2", "3", "5"]),
        gpu=dice.choice(["", "0.1", "0.3", "0.5", "0.7", "0.99", "1", "1.4", "2", "2.5", "3"]),
        binding=dice.choice(["", "", "cores", "numa"]),
    )
    return Member(spec, spec.tasks[0])


class _Story:
    """A cluster to which things happen; the table is told by differences, the plain world as a whole."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.nodes = [_node(dice, number) for number in range(dice.randint(1, 5))]
        self.hosts = {node.name: naive.Host(node) for node in self.nodes}
        self.table = Table(self.nodes)
        self.table.settle()
        self.placed: list[tuple[str, Member, Grant | None]] = []

    def go_on(self) -> None:
        dice, table = self.dice, self.table
        for _ in range(dice.randint(0, 6)):
            if self.placed and dice.random() < 0.4:
                name, member, grant = self.placed.pop(dice.randrange(len(self.placed)))
                table.release(table.row[name], member.task.request, member, grant)
                self.hosts[name].held.remove((member.task.request, grant))
                continue
            name, member = dice.choice(table.names), _member(dice)
            host = self.hosts[name]
            enough = all(host.free_amount(resource) >= much for resource, much in member.task.request.items())
            if enough and naive.possible(member.task, host):
                wanted = dice.choice([None, table.holds[table.row[name]].parts])
                chosen = wanted.find(member.task, dice.randint(-1, 5)) if wanted is not None else None
                grant = table.place(table.row[name], member.task.request, member, chosen)
                host.held.append((member.task.request, grant))
                self.placed.append((name, member, grant))


def _stories(offset: int):
    for seed in range(-(-CASES // 10)):
        story = _Story(seed * 5 + offset)
        for _ in range(10):
            story.go_on()
            yield story, _member(story.dice)


def test_the_same_nodes_are_refused_for_the_same_reasons():
    plugin = Devices()
    for story, member in _stories(1):
        runner = Runner()
        said: dict[str, set[tuple[str, bool]]] = {name: set() for name in story.table.names}
        for mask, reason in runner.refusals(plugin, member, story.table.view(), VIEW):
            for row in mask.nonzero()[0]:
                said[story.table.names[row]].add((reason.code, reason.evictable))
        assert not runner.faults, runner.faults
        assert said == {name: naive.refusals(member.task, host) for name, host in story.hosts.items()}


def test_a_node_that_is_not_refused_grants_free_devices():
    plugin = Devices()
    for story, member in _stories(2):
        task, nodes = member.task, story.table.view()
        if not needs_devices(task):
            continue
        refused = Runner().refused(plugin, member, nodes, VIEW)
        said_no = nodes.none() if refused is None else refused
        for name, parts, no in zip(story.table.names, nodes.parts(), said_no.tolist(), strict=True):
            host = story.hosts[name]
            if task.binding and not host.node.sockets:
                assert no
            elif host.free_amount("gpu") >= task.request.get("gpu", 0):
                grant = parts.find(task, story.dice.randint(-1, 4)) if parts is not None else None
                assert (grant is None) == no
                if grant is not None:
                    _check(grant, member, host)


def _check(grant: Grant, member: Member, host: naive.Host) -> None:
    task = member.task
    assert sum(milli for _, milli in grant.gpus) == task.request.get("gpu", 0)
    assert len({gpu for gpu, _ in grant.gpus}) == len(grant.gpus)
    assert all(host.free_gpus()[gpu] >= milli for gpu, milli in grant.gpus)
    assert len(set(grant.cpus)) == len(grant.cpus) == (-(-task.request.get("cpu", 0) // 1000) if task.binding else 0)
    assert set(grant.cpus) <= set().union(*host.free_cores(), set())
    if task.binding == "numa":
        assert any(
            set(grant.cpus) <= set(socket.cpus) and {gpu for gpu, _ in grant.gpus} <= set(socket.gpus)
            for socket in host.node.sockets
        )


def test_cached_answers_equal_fresh_ones():
    profile, kept = build_profile("default", scores={"gpu_hodei": 1}), {}
    for story, member in _stories(3):
        table = story.table
        gang = gang_of(1, member.job, 0)
        profile.admit(gang)
        if id(table) not in kept:
            kept = {id(table): (table, Rankings(table, Runner()))}
        old = kept[id(table)][1].of(profile, member, gang.shapes[0], VIEW)
        new = Rankings(table, Runner()).of(profile, member, gang.shapes[0], VIEW)
        assert old.order().tolist() == new.order().tolist()
