"""Reservations of the configuration file: their fields, and the capacity that they keep free."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from hodei.kube.scheduler.reservations import Reservations, read_file
from hodei.kube.scheduler.run import Options
from hodei.model.errors import InvalidInput
from hodei.model.facts import Fact
from unit.kube.fake_cluster import NOW_MS, FakeCluster

HOUR_MS = 3_600_000
DEMO = """
[[reservations]]
name = "demo"
namespace = "owner"
from = 2026-09-21T15:13:20Z
for = "2h"
{more}
"""


def _read(tmp_path: Path, text: str) -> Options:
    file = tmp_path / "hodei.toml"
    file.write_text(text)
    config, reservations = read_file(file)
    return Options(scheduling=config.scheduling, reservations=reservations)


def _cluster_and_reservations(
    options: Options, *nodes: str, labels: dict[str, str] | None = None
) -> tuple[FakeCluster, Reservations]:
    cluster = FakeCluster(options)
    for node in nodes:
        cluster.node(node, labels=labels or {})
    controller, pods = cluster.parts.controller, cluster.parts.pods
    configured = Reservations(options.reservations, controller, pods.take_facts, pods.add_facts, lambda: cluster.now_ms)
    return cluster, configured


def test_a_reservation_has_the_fields_of_hodei_reserve(tmp_path: Path):
    options = _read(
        tmp_path, '[scheduling.profiles.default]\nqueue = "batch"\n' + DEMO.format(more="nodes = 2\ncpu = 1")
    )
    (reservation,) = options.reservations
    assert (reservation.spec.name, reservation.spec.project, reservation.spec.count, reservation.spec.request) == (
        "demo",
        "owner",
        2,
        {"cpu": 1000},
    )
    assert (reservation.spec.start_ms, reservation.spec.end_ms) == (NOW_MS + HOUR_MS, NOW_MS + 3 * HOUR_MS)
    assert options.scheduling.profiles["default"].queue == "batch"


def test_the_reservation_of_the_documentation_is_valid(tmp_path: Path):
    page = (Path(__file__).parents[4] / "docs" / "how-to" / "kubernetes.md").read_text("utf-8")
    text = page[page.index("[[reservations]]") :].partition("```")[0]
    (reservation,) = _read(tmp_path, text).reservations
    assert (reservation.spec.name, reservation.spec.project, reservation.spec.request) == (
        "demo",
        "sales",
        {"cpu": 8000},
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (DEMO.format(more=""), "give either `nodes`"),
        (DEMO.format(more='nodes = 1\nselector = "a=b"'), "give selector, nodes or node"),
        (DEMO.format(more='nodes = 1\nproject = "x"'), "both namespace and project"),
        (DEMO.format(more="nodes = 1\nnoodles = 2"), "noodles"),
        (DEMO.format(more='selector = "in in"'), "selector"),
        (DEMO.format(more="nodes = 1") * 2, "is given twice"),
        ('[[reservations]]\nname = "a"\nnamespace = "b"\nfrom = "+1h"\nfor = "1h"\nnodes = 1', "relative to now"),
        ('[[reservations]]\nname = "a"\nnamespace = "b"\nfor = "1h"\nnodes = 1', "neither its start nor its end"),
        ("reservations = 3", "[[reservations]]"),
    ],
    ids=[
        "no nodes", "nodes in two ways", "two owners", "an unknown key", "an invalid selector", "a name twice",
        "a relative start", "no start", "not a table",
    ],
)  # fmt: skip
def test_an_invalid_reservation_is_reported(tmp_path: Path, text: str, problem: str):
    with pytest.raises(InvalidInput) as error:
        _read(tmp_path, text)
    assert problem in f"{error.value.message} {error.value.hint} {error.value.problems}"


def test_a_past_reservation_blocks_nothing(tmp_path: Path):
    past = '[[reservations]]\nname = "old"\nnamespace = "b"\nfrom = 2020-01-01T00:00:00Z\nfor = "1h"\nnodes = 1'
    cluster, configured = _cluster_and_reservations(_read(tmp_path, past), "n1")
    asyncio.run(configured.start())
    assert not cluster.parts.controller.cluster.availability.reservations


def test_a_reservation_without_a_start_begins_with_the_scheduler(tmp_path: Path):
    until = '[[reservations]]\nname = "now"\nnamespace = "b"\nuntil = 2028-01-01T00:00:00Z\nnodes = 1'
    cluster, configured = _cluster_and_reservations(_read(tmp_path, until), "n1")
    asyncio.run(configured.start())
    reservation = cluster.parts.controller.cluster.availability.reservations["now"]
    assert reservation.start_ms < NOW_MS < reservation.end_ms


def test_reservations_are_made_before_pending_pods_are_placed(tmp_path: Path):
    cluster, configured = _cluster_and_reservations(_read(tmp_path, DEMO.format(more="nodes = 1\ncpu = 3")), "n1")
    cluster.pod("endless", "2")
    cluster.pod("in-time", "2", estimate="30m")
    cluster.pod("own", "2", namespace="owner")
    asyncio.run(configured.start())
    cluster.step()
    assert (cluster.node_of("endless"), cluster.node_of("in-time"), cluster.node_of("own")) == ("", "n1", "n1")


def test_matching_nodes_may_join_later(tmp_path: Path):
    cluster, configured = _cluster_and_reservations(
        _read(tmp_path, DEMO.format(more='selector = "pool=gpu"')), "n1", labels={"pool": "gpu"}
    )
    asyncio.run(configured.start())
    cluster.step()
    reservations = cluster.parts.controller.cluster.availability.reservations
    assert [node for node, _ in reservations["demo"].places] == ["n1"]
    assert configured.reconcile() == []
    cluster.node("n2", labels={"pool": "gpu"})
    cluster.step()
    facts: Sequence[Fact] = configured.reconcile()
    cluster.step(*facts)
    assert [node for node, _ in reservations["demo"].places] == ["n1", "n2"]
    assert configured.reconcile() == []


def test_a_reservation_without_capacity_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    cluster, configured = _cluster_and_reservations(_read(tmp_path, DEMO.format(more="nodes = 2\ncpu = 1")), "n1")
    asyncio.run(configured.start())
    assert "reservation demo cannot be made yet" in caplog.text
    cluster.node("n2")
    cluster.step()
    cluster.step(*configured.reconcile())
    assert "demo" in cluster.parts.controller.cluster.availability.reservations
