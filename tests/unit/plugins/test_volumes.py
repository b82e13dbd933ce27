"""Volumes: each is attached once per node, up to the node's limit; and preemption may help."""

import pytest

from builders import a_job_spec, a_task
from hodei.engine.nodes import Table
from hodei.engine.points import Placed
from hodei.engine.view import Member
from hodei.model.affinity import NodeTerm, Requirement
from hodei.model.node import Node, Volume, VolumeCandidate, VolumeReach
from hodei.plugins.locality import ImageLocality
from hodei.plugins.volumes import Volumes
from unit.plugins.plugin_helpers import a_member, refused, scores


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
NEVER = "VOLUME_LIMIT: it needs more volumes than can be attached"


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
    near = VolumeReach("there", (NodeTerm((Requirement("z", "In", ("a",)),)),))
    assert refused(Volumes(), _member("v", reach=(near,)), table) == {
        "VOLUME_NOT_HERE: a volume cannot be reached from here": ["n2"]
    }


def test_members_without_volumes_get_no_opinion():
    table = _table(0)
    assert not refused(Volumes(), a_member(), table)
    assert Volumes().stamp(a_member(), table) == 0


NONE_LEFT = "NO_VOLUME_TO_BIND: no volume is free here, and none can be created here"


def _on(name: str) -> tuple[NodeTerm, ...]:
    return (NodeTerm((), (Requirement("metadata.name", "In", (name,)),)),)


def _claims(*wanted: tuple[str, dict[str, str]], made=None) -> Member:
    """Claims by handle, each with the volumes that it may have and their nodes ("": reached from everywhere)."""
    volumes = tuple(
        Volume(
            handle,
            candidates=tuple(VolumeCandidate(name, _on(node) if node else ()) for name, node in there.items()),
            creatable=made,
        )
        for handle, there in wanted
    )
    spec = a_job_spec("v", tasks=(a_task(volumes=volumes),))
    return Member(spec, spec.tasks[0])


def _placed(table: Table, member: Member, row: int) -> list[Placed]:
    return [Placed(member, 0, row, table.nodes[row], None, None)]


def test_two_claims_of_one_member_need_two_volumes():
    table, here = _table(-1, -1), {"a": "n1", "b": "n2", "c": "n2"}
    assert refused(Volumes(), _claims(("x", here), ("y", here)), table) == {NONE_LEFT: ["n1"]}


def test_a_matching_is_found_in_which_each_claim_has_a_volume():
    table, plugin = _table(-1), Volumes()
    member = _claims(("x", {"a": "n1", "b": "n1"}), ("y", {"a": "n1"}))
    assert not refused(plugin, member, table)
    assert plugin.reserve(None, _placed(table, member, 0), None) is None
    assert plugin.assumed.claims() == {"x": "b", "y": "a"}
    short = _claims(("x", {"a": "n1", "b": "n1"}), ("y", {"a": "n1", "b": "n1"}), ("z", {"a": "n1", "b": "n1"}))
    assert refused(Volumes(), short, table) == {NONE_LEFT: ["n1"]}


def test_where_a_volume_can_be_created_no_free_one_is_needed():
    table = _table(-1, -1)
    near = (VolumeReach("could_be", _on("n2")),)
    member = _claims(("x", {"a": "n1"}), ("y", {"a": "n1"}), made=near)
    assert refused(Volumes(), member, table) == {NONE_LEFT: ["n1"]}
    assert not refused(Volumes(), _claims(("x", {"a": "n1"}), ("y", {"a": "n1"}), made=()), table)


def test_a_volume_assumed_for_another_claim_is_not_free_until_released():
    table, plugin = _table(-1, -1), Volumes()
    here = {"a": "n1", "b": "n2"}
    first, second = _claims(("x", here)), _claims(("y", here))
    before = plugin.stamp(second, table)
    plugin.reserve(None, _placed(table, first, 0), None)
    assert plugin.stamp(second, table) != before
    assert refused(plugin, second, table) == {NONE_LEFT: ["n1"]}
    assert not refused(plugin, first, table)  # its own is in nobody's way
    assert plugin.reserve(None, _placed(table, second, 0), None) is not None
    assert plugin.assumed.claims() == {"x": "a"}
    plugin.unreserve(None, _placed(table, first, 0))
    assert not plugin.assumed
    assert not refused(plugin, second, table)


def test_members_of_a_gang_on_one_node_do_not_get_the_same_volume():
    table, plugin = _table(-1), Volumes()
    placed = [*_placed(table, _claims(("x", {"a": "n1"})), 0), *_placed(table, _claims(("y", {"a": "n1"})), 0)]
    assert plugin.reserve(None, placed, None) is not None
    assert not plugin.assumed


def test_a_free_volume_comes_before_a_new_one():
    table, plugin = _table(-1), Volumes()
    plugin.reserve(None, _placed(table, _claims(("x", {"a": "n1"}), ("y", {"a": "n1"}), made=()), 0), None)
    assert plugin.assumed.claims() == {"x": "a"}


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
