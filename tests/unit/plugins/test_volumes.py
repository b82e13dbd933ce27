"""Volumes: attachment limits of nodes, reachability, binding of claims; and image locality."""

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


def test_the_volume_limit_of_a_node_is_respected():
    table = _table(2, 3, 1, -1)
    for row in range(4):
        table.place(row, {}, _member(f"a{row}"))
    assert refused(Volumes(), _member("x", "y"), table) == {FULL: ["n1"], NEVER: ["n3"]}


def test_a_volume_that_is_already_attached_counts_once():
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


def test_a_volume_is_reachable_where_all_its_terms_hold():
    table = Table([Node("n1", "t", labels={"z": "a"}), Node("n2", "t", labels={"z": "b"})])
    table.settle()
    reachable = VolumeReach("exists", (NodeTerm((Requirement("z", "In", ("a",)),)),))
    assert refused(Volumes(), _member("v", reach=(reachable,)), table) == {
        "VOLUME_NOT_HERE: a volume cannot be reached from here": ["n2"]
    }


def test_members_without_volumes_get_no_opinion():
    table = _table(0)
    assert not refused(Volumes(), a_member(), table)
    assert Volumes().stamp(a_member(), table) == 0


NONE_LEFT = "NO_VOLUME_TO_BIND: no volume is free here, and none can be created here"


def _on(name: str) -> tuple[NodeTerm, ...]:
    return (NodeTerm((), (Requirement("metadata.name", "In", (name,)),)),)


def _claims(*claims: tuple[str, dict[str, str]], creatable=None) -> Member:
    """Claims by handle, each with its candidate volumes and their nodes ("": reachable from everywhere)."""
    volumes = tuple(
        Volume(
            handle,
            candidates=tuple(
                VolumeCandidate(name, _on(node) if node else ()) for name, node in volumes_of_claim.items()
            ),
            creatable=creatable,
        )
        for handle, volumes_of_claim in claims
    )
    spec = a_job_spec("v", tasks=(a_task(volumes=volumes),))
    return Member(spec, spec.tasks[0])


def _placed(table: Table, member: Member, row: int) -> list[Placed]:
    return [Placed(member, 0, row, table.nodes[row], None, None)]


def test_two_claims_of_one_member_need_two_volumes():
    table, on_nodes = _table(-1, -1), {"a": "n1", "b": "n2", "c": "n2"}
    assert refused(Volumes(), _claims(("x", on_nodes), ("y", on_nodes)), table) == {NONE_LEFT: ["n1"]}


def test_a_matching_is_found_in_which_each_claim_has_a_volume():
    table, plugin = _table(-1), Volumes()
    member = _claims(("x", {"a": "n1", "b": "n1"}), ("y", {"a": "n1"}))
    assert not refused(plugin, member, table)
    assert plugin.reserve(None, _placed(table, member, 0), None) is None
    assert plugin.assumed.claims() == {"x": "b", "y": "a"}
    too_many = _claims(("x", {"a": "n1", "b": "n1"}), ("y", {"a": "n1", "b": "n1"}), ("z", {"a": "n1", "b": "n1"}))
    assert refused(Volumes(), too_many, table) == {NONE_LEFT: ["n1"]}


def test_where_a_volume_can_be_created_no_free_one_is_needed():
    table = _table(-1, -1)
    reachable = (VolumeReach("creatable", _on("n2")),)
    member = _claims(("x", {"a": "n1"}), ("y", {"a": "n1"}), creatable=reachable)
    assert refused(Volumes(), member, table) == {NONE_LEFT: ["n1"]}
    assert not refused(Volumes(), _claims(("x", {"a": "n1"}), ("y", {"a": "n1"}), creatable=()), table)


def test_a_volume_assumed_for_another_claim_is_not_free_until_released():
    table, plugin = _table(-1, -1), Volumes()
    on_nodes = {"a": "n1", "b": "n2"}
    first, second = _claims(("x", on_nodes)), _claims(("y", on_nodes))
    before = plugin.stamp(second, table)
    plugin.reserve(None, _placed(table, first, 0), None)
    assert plugin.stamp(second, table) != before
    assert refused(plugin, second, table) == {NONE_LEFT: ["n1"]}
    assert not refused(plugin, first, table)  # its own assumed volume does not block it
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
    plugin.reserve(None, _placed(table, _claims(("x", {"a": "n1"}), ("y", {"a": "n1"}), creatable=()), 0), None)
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
    ids=[
        "too small to count",
        "half of the nodes hold it",
        "all nodes hold it",
        "more than the maximum",
        "another tag",
    ],
)
def test_nodes_that_hold_the_image_score_higher(held, points):
    table = Table(Node(name, "test", images=images) for name, images in held.items())
    table.settle()
    spec = a_job_spec("i", tasks=(a_task(images=("a",)),))
    assert scores(ImageLocality(), Member(spec, spec.tasks[0]), table) == points


def test_members_without_images_get_no_points():
    assert scores(ImageLocality(), a_member(), _table(1)) is None
