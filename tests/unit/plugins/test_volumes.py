"""Volumes: what is attached counts once for each node, up to its limit; and stopping others may help."""

import pytest

from builders import a_job_spec, a_task
from hodei.engine.nodes import Table
from hodei.engine.view import Member
from hodei.model.job import NodeTerm
from hodei.model.node import Node
from hodei.model.selector import Requirement
from hodei.model.volume import Reach, Volume
from hodei.plugins.image_locality import ImageLocality
from hodei.plugins.volumes import Volumes
from unit.plugins.asking import a_member, refused, scores


def _member(*handles: str, **fields) -> Member:
    volumes = tuple(Volume(handle, limit="csi", **fields) for handle in handles)
    spec = a_job_spec("v", tasks=(a_task(volumes=volumes),))
    return Member(spec, spec.tasks[0])


def _table(*limits: int) -> Table:
    table = Table(
        Node(f"n{number}", "test", volume_limits={"csi": limit} if limit >= 0 else {})
        for number, limit in enumerate(limits, 1)
    )
    table.settle()
    return table


FULL = "VOLUME_LIMIT: no more volumes can be attached"
NEVER = "VOLUME_LIMIT: so many volumes can not be attached"


def test_a_node_takes_as_many_volumes_as_it_says():
    table = _table(2, 3, 1, -1)
    for row in range(4):
        table.place(row, {}, _member(f"a{row}"))
    assert refused(Volumes(), _member("x", "y"), table) == {FULL: ["n1"], NEVER: ["n3"]}


def test_a_volume_that_is_there_already_counts_once():
    table = _table(1)
    table.place(0, {}, _member("a"))
    table.place(0, {}, _member("a"))
    assert not refused(Volumes(), _member("a"), table)
    assert refused(Volumes(), _member("b"), table) == {FULL: ["n1"]}


def test_counts_follow_placing_and_release_and_new_nodes():
    table, plugin = _table(1), Volumes()
    first, second = _member("a"), _member("b")
    assert not refused(plugin, second, table)
    table.place(0, {}, first)
    assert refused(plugin, second, table)
    stamp = plugin.stamp(second, table)
    table.release(0, {}, first)
    assert not refused(plugin, second, table)
    assert plugin.stamp(second, table) != stamp
    table.place(0, {}, first)
    table.put(Node("n0", "test", volume_limits={"csi": 1}))
    table.settle()
    assert refused(plugin, second, table) == {FULL: ["n1"]}


def test_a_volume_is_reached_where_all_its_terms_hold():
    table = Table([Node("n1", "t", labels={"z": "a"}), Node("n2", "t", labels={"z": "b"})])
    table.settle()
    near = Reach("there", (NodeTerm((Requirement("z", "In", ("a",)),)),))
    assert refused(Volumes(), _member("v", reach=(near,)), table) == {
        "VOLUME_NOT_HERE: a volume can not be reached from here": ["n2"]
    }


def test_members_without_volumes_are_none_of_its_business():
    table = _table(0)
    assert not refused(Volumes(), a_member(), table)
    assert Volumes().stamp(a_member(), table) == 0


MB = 2**20


@pytest.mark.parametrize(
    ("held", "points"),
    [
        ({"n1": {"a:latest": 40 * MB}, "n2": {}}, {"n1": 0, "n2": 0}),
        ({"n1": {"a:latest": 250 * MB}, "n2": {}}, {"n1": 1000, "n2": 0}),
        ({"n1": {"a:latest": 250 * MB}, "n2": {"a:latest": 250 * MB}}, {"n1": 2300, "n2": 2300}),
        ({"n1": {"a:latest": 5000 * MB}, "n2": {}}, {"n1": 10_000, "n2": 0}),
        ({"n1": {}, "n2": {"a:1": 500 * MB}}, {"n1": 0, "n2": 0}),
    ],
    ids=["too small to matter", "half of the nodes hold it", "all nodes hold it", "more than can count", "another tag"],
)
def test_nodes_that_hold_the_image_are_better(held, points):
    table = Table(Node(name, "test", images=images) for name, images in held.items())
    table.settle()
    spec = a_job_spec("i", tasks=(a_task(images=("a",)),))
    assert scores(ImageLocality(), Member(spec, spec.tasks[0]), table) == points


def test_members_without_images_get_no_points():
    assert scores(ImageLocality(), a_member(), _table(1)) is None
