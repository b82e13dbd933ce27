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


def _node(rng: random.Random, number: int) -> Node:
    cores, gpus = rng.choice([2, 4, 8]), rng.choice([0, 0, 1, 2, 4])
    half = rng.randint(0, cores)
    first, second = tuple(range(gpus // 2)), tuple(range(gpus // 2, gpus))
    sockets = rng.choice(
        [
            (),
            (Socket(tuple(range(cores)), tuple(range(gpus))),),
            (Socket(tuple(range(half)), first), Socket(tuple(range(half, cores)), second)),
            (Socket(tuple(range(half)), first), Socket(tuple(range(half, cores)))),
        ]
    )
    amount = rng.choice([gpus, gpus, f"{gpus}.5"]) if gpus else ""
    percent = rng.choice([{}, {}, {"gpu": 150}, {"gpu": 80, "cpu": 200}])
    return a_node(f"n{number}", cores, "16Gi", gpu=amount, sockets=sockets, overcommit_percent=percent)


def _member(rng: random.Random) -> Member:
    spec = a_job_spec(
        cpu=rng.choice(["0", "500m", "1", "1500m", "2", "3", "5"]),
        gpu=rng.choice(["", "0.1", "0.3", "0.5", "0.7", "0.99", "1", "1.4", "2", "2.5", "3"]),
        binding=rng.choice(["", "", "cores", "numa"]),
    )
    return Member(spec, spec.tasks[0])


class _RandomCluster:
    """A cluster with random changes, applied to the table incrementally and to the reference as a whole."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.nodes = [_node(rng, number) for number in range(rng.randint(1, 5))]
        self.hosts = {node.name: naive.Host(node) for node in self.nodes}
        self.table = Table(self.nodes)
        self.table.settle()
        self.placed: list[tuple[str, Member, Grant | None]] = []

    def change(self) -> None:
        rng, table = self.rng, self.table
        for _ in range(rng.randint(0, 6)):
            if self.placed and rng.random() < 0.4:
                name, member, grant = self.placed.pop(rng.randrange(len(self.placed)))
                table.release(table.row[name], member.task.request, member, grant)
                self.hosts[name].held.remove((member.task.request, grant))
                continue
            name, member = rng.choice(table.names), _member(rng)
            host = self.hosts[name]
            enough = all(host.free_amount(resource) >= much for resource, much in member.task.request.items())
            if enough and naive.possible(member.task, host):
                slots = rng.choice([None, table.node_usage[table.row[name]].devices])
                chosen = slots.find(member.task, rng.randint(-1, 5)) if slots is not None else None
                grant = table.place(table.row[name], member.task.request, member, chosen)
                host.held.append((member.task.request, grant))
                self.placed.append((name, member, grant))


def _random_clusters(offset: int):
    for seed in range(-(-CASES // 10)):
        cluster = _RandomCluster(seed * 5 + offset)
        for _ in range(10):
            cluster.change()
            yield cluster, _member(cluster.rng)


def test_the_same_nodes_are_refused_for_the_same_reasons():
    plugin = Devices()
    for cluster, member in _random_clusters(1):
        runner = Runner()
        reported: dict[str, set[tuple[str, bool]]] = {name: set() for name in cluster.table.names}
        for mask, reason in runner.refusals(plugin, member, cluster.table.view(), VIEW):
            for row in mask.nonzero()[0]:
                reported[cluster.table.names[row]].add((reason.code, reason.evictable))
        assert not runner.faults, runner.faults
        assert reported == {name: naive.refusals(member.task, host) for name, host in cluster.hosts.items()}


def test_a_node_that_is_not_refused_grants_free_devices():
    plugin = Devices()
    for cluster, member in _random_clusters(2):
        task, nodes = member.task, cluster.table.view()
        if not needs_devices(task):
            continue
        refused = Runner().refused(plugin, member, nodes, VIEW)
        refused_rows = nodes.none() if refused is None else refused
        for name, devices, is_refused in zip(cluster.table.names, nodes.devices(), refused_rows.tolist(), strict=True):
            host = cluster.hosts[name]
            if task.binding and not host.node.sockets:
                assert is_refused
            elif host.free_amount("gpu") >= task.request.get("gpu", 0):
                grant = devices.find(task, cluster.rng.randint(-1, 4)) if devices is not None else None
                assert (grant is None) == is_refused
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
    profile, cached = build_profile("default", scores={"gpu_hodei": 1}), {}
    for cluster, member in _random_clusters(3):
        table = cluster.table
        gang = gang_of(1, member.job, 0)
        profile.admit(gang)
        if id(table) not in cached:
            cached = {id(table): (table, Rankings(table, Runner()))}
        old = cached[id(table)][1].of(profile, member, gang.shapes[0], VIEW)
        new = Rankings(table, Runner()).of(profile, member, gang.shapes[0], VIEW)
        assert old.order().tolist() == new.order().tolist()
