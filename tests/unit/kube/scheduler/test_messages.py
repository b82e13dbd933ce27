"""kube-scheduler's messages from the engine's reasons."""

import pytest

from hodei.engine.runner import Runner
from hodei.engine.view import View
from hodei.kube.scheduler import messages
from hodei.kube.scheduler.messages import Messages, NodeReasons
from hodei.kube.scheduler.run import kube_profile
from hodei.model.job import Reason
from unit.kube.pod_factory import a_node, a_table, pod_info

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
GPU_TAINT = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}


def _refusal(pod, table, release=messages.LATEST) -> NodeReasons:
    profile, runner = kube_profile(), Runner()
    pairs = messages.filter_reasons(profile, runner, pod.member, table, View(0))
    assert not runner.faults
    return messages.node_reasons(pairs, pod.member, table, release, excluded=messages.unnamed_nodes(pod.member, table))


def _message(pod, table, **more) -> str:
    found = _refusal(pod, table, **more)
    after = messages.preemption(len(table.names), found, more.get("release", messages.LATEST))
    return messages.unschedulable(len(table.names), found.counts(), after=after)


def test_each_node_is_counted_for_the_first_filter_that_refuses_it():
    table = a_table(
        a_node("n1", taints=[GPU_TAINT], allocatable={"cpu": "1", "pods": "9"}),
        a_node("n2", allocatable={"cpu": "1", "pods": "9"}),
        a_node("n3", unschedulable=True, taints=[GPU_TAINT]),
        a_node("n4", allocatable={"cpu": "8", "pods": "9"}),
    )
    table.place(table.row["n4"], {"cpu": 7000})
    assert _message(pod_info(requests={"cpu": "2"}), table) == (
        "0/4 nodes are available: 1 node(s) had untolerated taint(s), 1 node(s) were unschedulable, 2 Insufficient cpu."
        " preemption: 0/4 nodes are available: 1 No preemption victims found for incoming pod,"
        " 3 Preemption is not helpful for scheduling."
    )


def test_every_insufficient_resource_is_reported_and_pods_have_their_own_text():
    table = a_table(a_node("n1", allocatable={"cpu": "1", "memory": "1Gi", "pods": "1"}))
    table.place(0, {"cpu": 500, "memory": 2**30, "pods": 1})
    assert _refusal(pod_info(requests={"cpu": "1", "memory": "1Gi"}), table).counts() == {
        "Insufficient cpu": 1, "Insufficient memory": 1, "Too many pods": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("minor", "expected"),
    [
        (33, Messages(names_taints=True)),
        (34, Messages(reports_claims=True)),
        (36, Messages(reports_claims=True)),
        (37, Messages()),
        (0, Messages()),
    ],
    ids=["1.33", "1.34", "1.36", "1.37", "unknown"],
)
def test_each_release_has_its_messages(minor: int, expected: Messages):
    assert messages.messages_for(minor) == expected


def test_a_refusal_before_any_node_has_its_own_preemption_text():
    assert messages.not_helpful(2).startswith("preemption: 0/2 nodes are available: 2 Preemption is not helpful")
    assert messages.not_helpful(2, messages.messages_for(36)) == "not found"


def test_older_releases_name_the_taint():
    other = {"key": "dedicated", "effect": "NoExecute"}
    table = a_table(a_node("n1", taints=[GPU_TAINT]), a_node("n2", taints=[other]))
    assert _message(pod_info(), table, release=Messages(names_taints=True)).startswith(
        "0/2 nodes are available: 1 node(s) had untolerated taint {dedicated: }, 1 node(s) had untolerated taint {gpu: yes}."
    )


def test_some_releases_report_claims_before_preemption():
    table = a_table(a_node("n1", taints=[GPU_TAINT]))
    assert _message(pod_info(), table, release=Messages(reports_claims=True)) == (
        "0/1 nodes are available: 1 node(s) had untolerated taint(s). no new claims to deallocate, preemption: 0/1 nodes are"
        " available: 1 Preemption is not helpful for scheduling."
    )


def test_nodes_that_a_daemon_pod_does_not_name_are_skipped():
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
    pod = pod_info(requests={"cpu": "8"}, affinity={"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [term]}}})
    table = a_table(a_node("n1"), a_node("n2", taints=[GPU_TAINT]), a_node("n3", unschedulable=True))
    assert _refusal(pod, table).counts() == {
        "Insufficient cpu": 1, "node(s) didn't satisfy plugin(s) [NodeAffinity]": 2,
    }  # fmt: skip
    assert messages.unnamed_nodes(pod_info().member, table) is None


def test_reasons_are_sorted_as_strings_with_their_numbers():
    counts = {"b": 2, "c": 10, "a": 2, "none": 0}
    assert messages.unschedulable(14, counts) == "0/14 nodes are available: 10 c, 2 a, 2 b."


def test_selector_and_affinity_are_one_reason():
    table = a_table(a_node("n1"), a_node("n2", labels={"a": "b"}))
    term = {"matchExpressions": [{"key": "x", "operator": "Exists"}]}
    pod = pod_info(nodeSelector={"a": "b"}, affinity={"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [term]}}})
    assert _refusal(pod, table).counts() == {"node(s) didn't match Pod's node affinity/selector": 2}


def test_pod_affinity_ports_and_spread():
    labels = {"kubernetes.io/hostname": "n1"}
    anti_affinity = {"podAntiAffinity": {REQUIRED: [{"topologyKey": "kubernetes.io/hostname", "labelSelector": {}}]}}
    affinity = {"podAffinity": {REQUIRED: [{"topologyKey": "zone", "labelSelector": {"matchLabels": {"x": "y"}}}]}}
    spread = {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}
    port = [{"ports": [{"hostPort": 80}]}]
    reasons = {}
    for name, fields in {
        "anti_affinity": {"affinity": anti_affinity}, "affinity": {"affinity": affinity}, "repelled": {}, "port": {"containers": port},
        "spread": {"topologySpreadConstraints": [spread]},
    }.items():  # fmt: skip
        table = a_table(a_node("n1", labels=labels))
        resident = pod_info(affinity=anti_affinity) if name == "repelled" else pod_info(containers=port)
        table.place(0, {}, resident.member)
        reasons[name] = list(_refusal(pod_info(**fields), table).counts())
    assert reasons == {
        "anti_affinity": ["node(s) didn't match pod anti-affinity rules"],
        "affinity": ["node(s) didn't match pod affinity rules"],
        "repelled": ["node(s) didn't satisfy existing pods anti-affinity rules"],
        "port": ["node(s) didn't have free ports for the requested pod ports"],
        "spread": ["node(s) didn't match pod topology spread constraints (missing required label)"],
    }


def test_a_refusal_before_any_node_is_the_only_reason():
    assert messages.unschedulable(3, {"x": 3}, before="pod affinity terms conflict") == (
        "0/3 nodes are available: pod affinity terms conflict."
    )
    assert messages.unschedulable(0, {}) == "no nodes available to schedule pods"
    assert messages.unschedulable(1, {"x": 1}, after=messages.not_eligible(messages.NEVER_PREEMPTS)) == (
        "0/1 nodes are available: 1 x. preemption: not eligible due to preemptionPolicy=Never."
    )


def test_our_own_reasons_keep_their_text():
    assert messages.LATEST.text(Reason("mine", "MINE", "because")) == "because"


@pytest.mark.parametrize(("length", "cut"), [(1024, False), (1025, True)])
def test_a_note_is_cut_to_the_limit_of_an_event(length, cut):
    note = messages.note("x" * length)
    assert len(note) == 1024
    assert note.endswith(" ...") == cut


def test_other_texts():
    assert messages.assigned("ns", "p", "n1") == "Successfully assigned ns/p to n1"
    assert messages.preempted("uid", "n1") == "Preempted by pod uid on node n1"
    assert messages.preempting("hodei") == "hodei: preempting to accommodate a higher priority pod"
