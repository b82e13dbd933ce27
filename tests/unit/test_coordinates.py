"""Latitude and longitude of nodes: from the configuration, in every form, and their effect on `near`."""

from __future__ import annotations

import pytest

from builders import a_node
from hodei.backends.docker.backend import node_of
from hodei.backends.docker.settings import Host
from hodei.backends.registry import common_of, node_defaults
from hodei.configuration import node_offer
from hodei.jobfile.render import node_view
from hodei.model.config import NodeConfig
from hodei.model.errors import InvalidInput
from hodei.model.node import Location
from hodei.wiring import instant_node
from unit.control.harness import Harness

BERLIN, PARIS, OSLO = (52.52, 13.405), (48.857, 2.352), (59.913, 10.752)


def _node(name: str, coordinates: tuple[float, float]):
    return instant_node(node_offer(NodeConfig(name, cpu=8, memory="8Gi", lat=coordinates[0], lng=coordinates[1])))


def test_a_job_is_placed_on_the_nearest_node():
    harness = Harness(_node("oslo", OSLO), _node("paris", PARIS))
    harness.submit(1, near=Location().with_coordinates(*BERLIN))
    harness.submit(2, near=Location().with_coordinates(*PARIS))
    terms = {term.plugin: term.score for term in harness.runs["1.0.1"].decision.chosen.terms}
    assert terms["proximity"] > 2800
    assert [harness.runs[f"{job}.0.1"].node for job in (1, 2)] == ["oslo", "paris"]


def test_coordinates_are_shown_with_the_node():
    view = node_view(_node("paris", PARIS), {}, 0)
    assert (view.location["lat"], view.location["lng"]) == PARIS


def test_docker_hosts_and_backends_may_have_coordinates():
    docker = node_of(Host("h1", lat=PARIS[0], lng=PARIS[1]), {}, {}, backend="docker", problem="")
    assert docker.location == Location().with_coordinates(*PARIS)
    fill_in = node_defaults({"kind": "slurm", "lat": OSLO[0], "lng": OSLO[1]})
    assert fill_in(a_node("n1")).location == Location().with_coordinates(*OSLO)
    assert fill_in(docker).location == Location().with_coordinates(*PARIS)  # the node's own coordinates count


@pytest.mark.parametrize(
    ("lat", "lng", "message"),
    [(91.0, 0.0, "no place on earth"), (0.0, 181.0, "no place on earth"), (1.0, None, "belong together")],
)
def test_incomplete_and_invalid_coordinates_are_refused(lat, lng, message):
    with pytest.raises(InvalidInput, match=message):
        node_offer(NodeConfig("n1", lat=lat, lng=lng))
    if message == "no place on earth":
        message = "out of range"
    table = {"kind": "slurm", "lat": lat} | ({} if lng is None else {"lng": lng})
    with pytest.raises(InvalidInput, match=message):
        common_of("hpc", table)
