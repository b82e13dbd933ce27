"""Each filter refuses the right nodes, with a stable code and a helpful text."""

from __future__ import annotations

import pytest

from builders import a_job_spec, a_node, a_task
from hodei.engine.view import Member
from hodei.model.affinity import NodeTerm, Requirement
from hodei.model.job import Affinity, BackendChoice, PreferredTerm, Toleration
from hodei.model.node import Taint
from hodei.plugins.affinity import NodeAffinity
from hodei.plugins.fit import Fit
from hodei.plugins.health import Health
from hodei.plugins.platform import Platform
from hodei.plugins.taints import Taints
from unit.plugins.plugin_helpers import a_member, a_table, refused, scores

SSD = Requirement("disk", "In", ("ssd",))
ZONED = Requirement("zone", "Exists")


def test_fit_names_every_resource_that_is_short():
    table = a_table([a_node("big", 8, "32Gi"), a_node("small", 1, "2Gi")], {"big": {"cpu": "6"}})
    assert refused(Fit(), a_member(cpu="4", memory="4Gi"), table) == {
        "INSUFFICIENT_CPU: Insufficient cpu": ["big", "small"],
        "INSUFFICIENT_MEMORY: Insufficient memory": ["small"],
    }


def test_fit_allows_an_exact_fit():
    table = a_table([a_node("n1", 4)], {"n1": {"cpu": "3"}})
    assert refused(Fit(), a_member(cpu="1"), table) == {}
    assert "INSUFFICIENT_CPU: Insufficient cpu" in refused(Fit(), a_member(cpu="1001m"), table)


def test_fit_refuses_every_node_for_a_resource_that_none_has():
    member = a_member(request={"example.com/fpga": 1})
    assert refused(Fit(), member, a_table([a_node("n1"), a_node("n2")])) == {
        "INSUFFICIENT_EXAMPLE_COM_FPGA: Insufficient example.com/fpga": ["n1", "n2"]
    }


def test_a_request_of_nothing_always_fits():
    table = a_table([a_node("full", 1, "1Gi")], {"full": {"cpu": "1", "memory": "1Gi"}})
    assert refused(Fit(), a_member(cpu=0, memory=0), table) == {}


def test_fit_says_what_the_nearest_node_lacks():
    table = a_table([a_node("n1", 4, "16Gi")], {"n1": {"cpu": "3"}})
    size, text = Fit().lacks(a_member(cpu="2500m"), table.view(slice(0, 1)), None)
    assert text == "lacks 1.5 cpu (1 of 4 free, 2.5 requested)"
    assert size == 600  # thousandths of the request


def test_health_refuses_nodes_that_are_not_ready_with_the_reason():
    table = a_table(
        [
            a_node("down", ready=False, not_ready_reason="backend local is out of reach"),
            a_node("cordoned", cordoned=True),
            a_node("mute", ready=False),
            a_node("well"),
        ]
    )
    assert refused(Health(), a_member(), table) == {
        "NODE_NOT_READY: not ready: backend local is out of reach": ["down"],
        "NODE_NOT_READY: not ready": ["mute"],
        "NODE_CORDONED: cordoned": ["cordoned"],
    }


def test_health_reports_both_not_ready_and_cordoned():
    table = a_table([a_node("n1", ready=False, cordoned=True)])
    assert set(refused(Health(), a_member(), table)) == {"NODE_NOT_READY: not ready", "NODE_CORDONED: cordoned"}


@pytest.mark.parametrize(
    ("wanted", "has", "fits"),
    [
        pytest.param("amd64", "x86_64", True, id="two names of one architecture"),
        pytest.param("arm64", "aarch64", True, id="two names of another"),
        pytest.param("ARM64", "aarch64", True, id="upper case"),
        pytest.param("arm64", "x86_64", False, id="another architecture"),
        pytest.param("riscv64", "riscv64", True, id="a rare architecture"),
        pytest.param("amd64", "", False, id="an unknown architecture"),
        pytest.param("", "x86_64", True, id="no requirement"),
    ],
)
def test_the_architecture_must_match(wanted, has, fits):
    found = refused(Platform(), a_member(arch=wanted), a_table([a_node("n1", arch=has)]))
    assert found == {} if fits else list(found) == [f"WRONG_ARCHITECTURE: architecture is not {wanted.lower()}"]


def test_the_gpu_type_must_match():
    table = a_table([a_node("a", gpu_type="a100"), a_node("b", gpu_type="T4"), a_node("c")])
    assert refused(Platform(), a_member(gpu_type="t4"), table) == {"WRONG_GPU_TYPE: gpu type is not t4": ["a", "c"]}


def test_a_specific_backend_is_required_and_a_preferred_one_scores():
    table = a_table([a_node("a", backend="east"), a_node("b", backend="west"), a_node("c", backend="moon")])
    specific = a_member(backend=BackendChoice("specific", ("east", "west")))
    assert refused(Platform(), specific, table) == {"OTHER_BACKEND: not on backend east or west": ["c"]}
    preferred = a_member(backend=BackendChoice("preferred", ("west", "east")))
    assert refused(Platform(), preferred, table) == {}
    assert scores(Platform(), preferred, table) == {"b": 10_000, "a": 5_000, "c": 0}
    assert scores(Platform(), a_member(), table) is None


def test_every_label_of_the_selector_must_be_there():
    table = a_table(
        [a_node("a", labels={"disk": "ssd", "zone": "z1"}), a_node("b", labels={"disk": "hdd"}), a_node("c")]
    )
    member = a_member(node_selector={"disk": "ssd", "zone": "z1"})
    assert refused(NodeAffinity(), member, table) == {
        "SELECTOR_MISMATCH: label disk=ssd required": ["b", "c"],
        "SELECTOR_MISMATCH: label zone=z1 required": ["b", "c"],
    }


def test_one_of_the_required_terms_is_enough_and_all_of_a_term_must_hold():
    table = a_table(
        [
            a_node("both", labels={"disk": "ssd", "zone": "z1"}),
            a_node("named"),
            a_node("half", labels={"disk": "ssd"}),
        ]
    )
    terms = (NodeTerm((SSD, ZONED)), NodeTerm(fields=(Requirement("metadata.name", "In", ("named",)),)))
    assert refused(NodeAffinity(), a_member(affinity=Affinity(terms)), table) == {
        "AFFINITY_MISMATCH: required affinity [disk=ssd, zone] or [metadata.name=named] not met": ["half"]
    }


def test_an_empty_required_term_matches_no_node():
    found = refused(NodeAffinity(), a_member(affinity=Affinity((NodeTerm(),))), a_table([a_node("n1")]))
    assert list(found.values()) == [["n1"]]


def test_preferred_terms_add_their_weights_and_the_best_node_gets_all_points():
    table = a_table(
        [a_node("a", labels={"disk": "ssd", "zone": "z"}), a_node("b", labels={"disk": "ssd"}), a_node("c")]
    )
    preferences = (
        PreferredTerm(30, NodeTerm((SSD,))),
        PreferredTerm(10, NodeTerm((ZONED,))),
        PreferredTerm(99, NodeTerm()),
    )
    member = a_member(affinity=Affinity(preferred=preferences))
    assert scores(NodeAffinity(), member, table) == {"a": 10_000, "b": 7_500, "c": 0}
    assert refused(NodeAffinity(), member, table) == {}


def test_without_preferences_affinity_has_no_opinion():
    assert scores(NodeAffinity(), a_member(), a_table([a_node()])) is None


def test_each_untolerated_taint_is_reported():
    team, spot, soft = Taint("dedicated", "team"), Taint("spot", "", "NoExecute"), Taint("old", "", "PreferNoSchedule")
    table = a_table([a_node("a", taints=(team, spot)), a_node("b", taints=(team,)), a_node("c", taints=(soft,))])
    assert refused(Taints(), a_member(), table) == {
        "UNTOLERATED_TAINT: untolerated taint dedicated=team:NoSchedule": ["a", "b"],
        "UNTOLERATED_TAINT: untolerated taint spot:NoExecute": ["a"],
    }
    tolerant = a_member(tolerations=(Toleration("dedicated", "Exists"),))
    assert refused(Taints(), tolerant, table) == {"UNTOLERATED_TAINT: untolerated taint spot:NoExecute": ["a"]}
    assert refused(Taints(), a_member(tolerations=(Toleration("", "Exists"),)), table) == {}


def test_a_filter_considers_only_the_given_task():
    spec = a_job_spec(tasks=[a_task("head", cpu="8"), a_task("worker", cpu="1")])
    table = a_table([a_node("n1", 4)])
    head, worker = Member(spec, spec.tasks[0]), Member(spec, spec.tasks[1])
    assert refused(Fit(), head, table)
    assert not refused(Fit(), worker, table)
