"""The node requirements of a pod's volumes: bound, unbound and missing ones."""

import pytest
from msgspec import structs

from hodei.engine.runner import Runner
from hodei.engine.view import View
from hodei.kube.api.objects import (
    BIND_COMPLETED,
    Claim,
    CsiDriver,
    StorageCapacity,
    StorageClass,
    Volume,
    from_builtins,
)
from hodei.kube.api.objects import Node as KubeNode
from hodei.kube.scheduler import messages, translate
from hodei.kube.scheduler.loop import VolumeBinder
from hodei.kube.scheduler.run import assumed_volumes
from hodei.kube.scheduler.translate import PodContext
from hodei.kube.scheduler.volumes import Storage, claims_to_bind, volume_on
from hodei.plugins.volumes import Volumes
from unit.kube.fake_cluster import FakeCluster
from unit.kube.pod_factory import a_node, a_pod, a_table

ZONE = "topology.kubernetes.io/zone"


def _claim(name="data", *, volume="", cls="fast", modes=("ReadWriteOnce",), size="1Gi", **meta):
    annotations = {BIND_COMPLETED: "yes"} if volume else {}
    fields = {
        "metadata": {"name": name, "namespace": "ns", "annotations": annotations, **meta},
        "spec": {
            "volumeName": volume, "storageClassName": cls, "accessModes": list(modes),
            "resources": {"requests": {"storage": size}},
        },
    }  # fmt: skip
    return from_builtins(fields, Claim)


def _volume(name="pv", *, nodes=None, labels=None, cls="fast", size="1Gi", driver="", claim=None):
    spec = {"storageClassName": cls, "capacity": {"storage": size}, "accessModes": ["ReadWriteOnce"]}
    if nodes is not None:
        expression = {"key": "kubernetes.io/hostname", "operator": "In", "values": nodes}
        spec["nodeAffinity"] = {"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}}
    if driver:
        spec["csi"] = {"driver": driver, "volumeHandle": name}
    if claim:
        spec["claimRef"] = {"namespace": "ns", "name": claim}
    return from_builtins({"metadata": {"name": name, "labels": labels or {}}, "spec": spec}, Volume)


def _class(name="fast", *, mode="WaitForFirstConsumer", provisioner="kubernetes.io/no-provisioner", zones=()):
    fields = {"metadata": {"name": name}, "provisioner": provisioner, "volumeBindingMode": mode}
    if zones:
        fields["allowedTopologies"] = [{"matchLabelExpressions": [{"key": ZONE, "values": list(zones)}]}]
    return from_builtins(fields, StorageClass)


LATE_BINDING = _class()


def _storage(claims=(), volumes=(), classes=(LATE_BINDING,)):
    return Storage(
        {("ns", each.metadata.name): each for each in claims},
        {each.metadata.name: each for each in volumes},
        {each.metadata.name: each for each in classes},
    )


def _uses(*names, **fields):
    return a_pod(volumes=[{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in names], **fields)


def _refused(pod, storage, *nodes, residents=()):
    """The refused nodes with kube-scheduler's reasons."""
    cache = PodContext(storage=storage)
    table = a_table(*nodes)
    for name, other in residents:
        resident = translate.pod(other, cache)
        table.place(table.row[name], resident.request, resident.member)
    pod_info, runner = translate.pod(pod, cache), Runner()
    assert not pod_info.refused
    pairs = runner.refusals(Volumes(), pod_info.member, table.view(), View(0))
    assert not runner.faults
    found = messages.node_reasons(pairs, pod_info.member, table)
    by_node = {name: [text for text, mask in found.reasons.items() if mask[row]] for name, row in table.row.items()}
    return {name: texts for name, texts in by_node.items() if texts}


def _node(name, zone="", **fields):
    labels = {"kubernetes.io/hostname": name} | ({ZONE: zone} if zone else {})
    return a_node(name, labels=labels, **fields)


def test_a_bound_volume_is_reached_only_from_its_own_nodes():
    storage = _storage([_claim(volume="pv")], [_volume(nodes=["n1"])])
    assert _refused(_uses("data"), storage, _node("n1"), _node("n2")) == {
        "n2": ["node(s) didn't match PersistentVolume's node affinity"]
    }


@pytest.mark.parametrize(
    ("label", "value"),
    [(ZONE, "a"), (ZONE, "a__c"), ("failure-domain.beta.kubernetes.io/zone", "a")],
    ids=["a zone", "several zones", "the label's old name"],
)
def test_a_volume_of_a_zone_is_reached_from_its_zone_and_from_nodes_without_zones(label, value):
    storage = _storage([_claim(volume="pv")], [_volume(labels={label: value})])
    nodes = (_node("n1", "a"), _node("n2", "b"), _node("n3"))
    assert _refused(_uses("data"), storage, *nodes) == {"n2": ["node(s) had no available volume zone"]}


def test_an_unbound_claim_goes_where_a_free_volume_matches():
    free = [
        _volume("small", nodes=["n1"], size="500Mi"), _volume("fits", nodes=["n2"]),
        _volume("taken", nodes=["n3"], claim="other"), _volume("reserved", nodes=["n4"], claim="data"),
        _volume("other", nodes=["n5"], cls="slow"),
    ]  # fmt: skip
    nodes = [_node(f"n{number}") for number in range(1, 6)]
    refused = _refused(_uses("data"), _storage([_claim()], free), *nodes)
    assert sorted(refused) == ["n1", "n3", "n5"]
    assert refused["n1"] == ["node(s) didn't find available persistent volumes to bind"]


def test_an_unbound_claim_goes_where_its_class_can_provision():
    storage_class = _class(provisioner="csi.example", zones=["a"])
    assert list(
        _refused(_uses("data"), _storage([_claim()], (), [storage_class]), _node("n1", "a"), _node("n2", "b"))
    ) == ["n2"]
    anywhere = _class(provisioner="csi.example")
    assert not _refused(_uses("data"), _storage([_claim()], (), [anywhere]), _node("n1", "a"))
    assert claims_to_bind(_uses("data"), _storage([_claim()], (), [anywhere]))[0].metadata.name == "data"


@pytest.mark.parametrize(
    ("claims", "text"),
    [
        ([], 'persistentvolumeclaim "data" not found'),
        ([_claim(deletionTimestamp="2026-01-01T00:00:00Z")], 'persistentvolumeclaim "data" is being deleted'),
        ([_claim(cls="now")], "pod has unbound immediate PersistentVolumeClaims"),
        ([_claim(volume="absent")], "node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)"),
    ],
    ids=["missing", "being deleted", "not bound yet", "bound to nothing"],
)
def test_a_pod_whose_claim_cannot_be_bound_is_refused_at_once(claims, text):
    storage = _storage(claims, (), [_class(), _class("now", mode="Immediate")])
    refused = translate.pod(_uses("data"), PodContext(storage=storage)).refused
    assert [reason.text for reason in refused] == [text]


def test_an_ephemeral_claim_is_named_after_pod_and_volume_and_must_be_owned_by_the_pod():
    pod = a_pod("p", uid="u1", volumes=[{"name": "scratch", "ephemeral": {"volumeClaimTemplate": {}}}])
    own = _claim("p-scratch", volume="pv", ownerReferences=[{"uid": "u1"}])
    foreign = _claim("p-scratch", volume="pv", ownerReferences=[{"uid": "u2"}])
    assert not translate.pod(pod, PodContext(storage=_storage([own], [_volume()]))).refused
    for storage in (_storage([foreign], [_volume()]), _storage()):
        assert translate.pod(pod, PodContext(storage=storage)).refused


def test_a_claim_for_one_pod_only_is_refused_everywhere_while_another_uses_it():
    storage = _storage([_claim(volume="pv", modes=["ReadWriteOncePod"])], [_volume()])
    refused = _refused(_uses("data", name="b"), storage, _node("n1"), _node("n2"), residents=[("n1", _uses("data"))])
    assert list(refused) == ["n1", "n2"]
    assert "ReadWriteOncePod access mode" in refused["n1"][0]


def test_inline_disks_are_shared_on_a_node_only_if_read_only():
    def disk(read_only):
        return a_pod(volumes=[{"name": "d", "gcePersistentDisk": {"pdName": "x", "readOnly": read_only}}])

    nodes = (_node("n1"), _node("n2"))
    assert _refused(disk(False), _storage(), *nodes, residents=[("n1", disk(True))]) == {
        "n1": ["node(s) had no available disk"]
    }
    assert not _refused(disk(True), _storage(), *nodes, residents=[("n1", disk(True))])


def test_a_claim_takes_only_volumes_that_its_selector_matches():
    claim = from_builtins(
        {"metadata": {"namespace": "ns", "name": "c"},
         "spec": {"storageClassName": "local", "accessModes": ["ReadWriteOnce"], "selector": {"matchLabels": {"tier": "fast"}}}},
        Claim,
    )  # fmt: skip

    def volume(name, tier):
        spec = {"storageClassName": "local", "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}}
        return from_builtins({"metadata": {"name": name, "labels": {"tier": tier}}, "spec": spec}, Volume)

    known = Storage(volumes={"a": volume("a", "slow"), "b": volume("b", "fast")})
    assert volume_on(KubeNode(), claim, known).metadata.name == "b"
    assert volume_on(KubeNode(), claim, Storage(volumes={"a": volume("a", "slow")})) is None


def _using(claim):
    return {"name": claim, "persistentVolumeClaim": {"claimName": claim}}


def _driver(name="example.com/disks", *, publishes=True):
    return from_builtins({"metadata": {"name": name}, "spec": {"storageCapacity": publishes}}, CsiDriver)


def _capacity(name, zone, size, *, cls="made", largest=None):
    fields = {
        "metadata": {"name": name, "namespace": "ns"}, "storageClassName": cls, "capacity": size,
        "nodeTopology": {"matchLabels": {ZONE: zone}} if zone else zone,
    }  # fmt: skip
    return from_builtins({**fields, **({"maximumVolumeSize": largest} if largest else {})}, StorageCapacity)


def _published(*capacities, driver=None, size="10Gi", volumes=(), zones=()):
    storage_class = _class("made", provisioner="example.com/disks", zones=zones)
    storage = _storage([_claim(cls="made", size=size)], volumes, [storage_class])
    return structs.replace(
        storage,
        drivers={"example.com/disks": driver or _driver()},
        capacities={("ns", each.metadata.name): each for each in capacities},
    )


SPACE = "node(s) did not have enough free storage"
IN_ZONES = {"n1": "a", "n2": "b", "n3": "c"}


@pytest.mark.parametrize(
    ("storage", "refusals"),
    [
        (_published(_capacity("x", "a", "20Gi"), _capacity("y", "b", "5Gi")), {"n2": SPACE, "n3": SPACE}),
        (_published(), {"n1": SPACE, "n2": SPACE, "n3": SPACE}),
        (_published(_capacity("x", "a", "20Gi", cls="other")), {"n1": SPACE, "n2": SPACE, "n3": SPACE}),
        (_published(_capacity("x", "a", "20Gi", largest="5Gi")), {"n1": SPACE, "n2": SPACE, "n3": SPACE}),
        (_published(_capacity("x", "a", "1Gi", largest="10Gi")), {"n2": SPACE, "n3": SPACE}),
        (_published(_capacity("x", {}, "20Gi")), {}),
        (_published(_capacity("x", None, "20Gi")), {"n1": SPACE, "n2": SPACE, "n3": SPACE}),
        (_published(driver=_driver(publishes=False)), {}),
        (_published(_capacity("x", "a", "20Gi"), _capacity("y", "b", "20Gi"), zones=("a", "c")),
         {"n2": "node(s) didn't find available persistent volumes to bind", "n3": SPACE}),
    ],
    ids=["one is too small", "nothing is published", "of another class", "maximumVolumeSize too small", "capacity below maximumVolumeSize",
         "all nodes", "no nodes", "a driver that does not publish", "with allowed topologies"],
)  # fmt: skip
def test_volumes_are_provisioned_where_the_driver_has_capacity(storage, refusals):
    nodes = [a_node(name, labels={ZONE: zone}) for name, zone in IN_ZONES.items()]
    found = translate.pod(a_pod(volumes=[_using("data")]), PodContext(storage))
    assert not found.refused
    table = a_table(*nodes)
    pairs = Runner().refusals(Volumes(), found.member, table.view(), View(0))
    reasons = {}
    for mask, reason in pairs:
        for row in mask.nonzero()[0]:
            reasons.setdefault(table.names[row], []).append(messages._TEXTS[reason.code])
    assert {name: texts[0] for name, texts in reasons.items()} == refusals


def test_a_free_volume_is_used_where_no_capacity_is_left():
    local = _volume("here", nodes=["n2"], cls="made", size="10Gi")
    storage = _published(_capacity("x", "a", "20Gi"), volumes=[local])
    found = translate.pod(a_pod(volumes=[_using("data")]), PodContext(storage)).job.tasks[0].volumes[0]
    assert [choice.name for choice in found.candidates] == ["here"]
    table = a_table(*(a_node(n, labels={ZONE: z, "kubernetes.io/hostname": n}) for n, z in IN_ZONES.items()))
    found = translate.pod(a_pod(volumes=[_using("data")]), PodContext(storage))
    masks = [mask for mask, _ in Runner().refusals(Volumes(), found.member, table.view(), View(0))]
    assert [table.names[row] for row in sum(masks).nonzero()[0]] == ["n3"]


def _odd_volume(**spec):
    fields = {"storageClassName": "fast", "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], **spec}
    return from_builtins({"metadata": {"name": "odd"}, "spec": fields}, Volume)


def _reached_by(operator, *values):
    expression = {"key": "disk", "operator": operator, "values": list(values)}
    return {"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}}


@pytest.mark.parametrize(
    "odd",
    [
        _odd_volume(capacity={"storage": "²"}),
        _odd_volume(nodeAffinity=_reached_by("Near", "x")),
        _odd_volume(nodeAffinity=_reached_by("Near", "x"), claimRef={"namespace": "ns", "name": "data-0"}),
    ],
    ids=["size", "place", "bound to the claim"],
)
def test_an_unreadable_volume_is_named_and_does_not_block_others(odd):
    cluster = _cluster(odd, _volume("pv", nodes=["n1"]))
    cluster.pod("p0", volumes=[_using("data-0")])
    cluster.step()
    assert cluster.node_of("p0") == "n1"
    assert cluster.parts.cache.volumes.refusals.now().total() == 1
    claim = cluster.parts.cache.claims.objects["ns", "data-0"]
    node = a_node("n1", labels={"kubernetes.io/hostname": "n1"})
    assert volume_on(node, claim, cluster.parts.cache.context.storage).metadata.name == "pv"


@pytest.mark.parametrize(
    "odd", [_capacity("odd", "a", "²"), _capacity("odd", "a", "1", largest="-1")], ids=["left", "most"]
)
def test_unreadable_capacity_is_ignored_and_does_not_block_others(odd):
    storage = _published(odd, _capacity("x", "b", "20Gi"))
    found = translate.pod(a_pod(volumes=[_using("data")]), PodContext(storage))
    assert not found.refused
    table = a_table(*(a_node(name, labels={ZONE: zone}) for name, zone in IN_ZONES.items()))
    masks = [mask for mask, _ in Runner().refusals(Volumes(), found.member, table.view(), View(0))]
    assert [table.names[row] for row in sum(masks).nonzero()[0]] == ["n1", "n3"]


def _cluster(*volumes, claims=2):
    cluster = FakeCluster()
    for name in ("n1", "n2"):
        cluster.node(name, labels={"kubernetes.io/hostname": name})
    cluster.parts.cache.classes.changed("ADDED", LATE_BINDING)
    for volume in volumes:
        cluster.parts.cache.volumes.changed("ADDED", volume)
    for number in range(claims):
        cluster.parts.cache.claims.changed("ADDED", _claim(f"data-{number}"))
    return cluster


def test_of_two_pods_in_one_step_only_one_gets_the_last_free_volume():
    cluster = _cluster(_volume("pv", nodes=["n1"]))
    for number in range(2):
        cluster.pod(f"p{number}", volumes=[_using(f"data-{number}")])
    cluster.step()
    assert sorted([cluster.node_of("p0"), cluster.node_of("p1")]) == ["", "n1"]


def test_a_pod_without_a_volume_gets_the_next_that_appears():
    cluster = _cluster(_volume("pv", nodes=["n1"]))
    for number in range(2):
        cluster.pod(f"p{number}", volumes=[_using(f"data-{number}")])
    cluster.step()
    cluster.parts.cache.volumes.changed("ADDED", _volume("pv2", nodes=["n2"]))
    cluster.step()
    assert sorted([cluster.node_of("p0"), cluster.node_of("p1")]) == ["n1", "n2"]


def test_a_pod_with_two_claims_is_placed_where_two_volumes_are():
    cluster = _cluster(_volume("a", nodes=["n1"]), _volume("b", nodes=["n2"]), _volume("c", nodes=["n2"]))
    cluster.pod("p", volumes=[_using("data-0"), _using("data-1")])
    cluster.step()
    assert cluster.node_of("p") == "n2"


def test_an_assumed_volume_is_released_if_the_pod_is_not_bound():
    cluster = _cluster(_volume("pv", nodes=["n1"]))
    assumed = assumed_volumes(cluster.parts.controller)
    binder = VolumeBinder(cluster.parts.cache, None, cluster.parts.pods, assumed)
    cluster.pod("p0", volumes=[_using("data-0")])
    cluster.step()
    assert assumed.claims() == {"claim/ns/data-0": "pv"}
    binder.release_pod(cluster.parts.pods.entries["uid-p0"].pod)
    assert not assumed


def test_an_assumed_volume_is_released_when_the_cluster_shows_the_binding():
    cluster = _cluster(_volume("pv", nodes=["n1"]))
    assumed = assumed_volumes(cluster.parts.controller)
    VolumeBinder(cluster.parts.cache, None, cluster.parts.pods, assumed)
    cluster.pod("p0", volumes=[_using("data-0")])
    cluster.step()
    cluster.parts.cache.claims.changed("MODIFIED", _claim("data-0", volume="pv"))
    assert assumed  # the volume's own watch may lag behind that of the claim
    cluster.parts.cache.volumes.changed("MODIFIED", _volume("pv", nodes=["n1"], claim="data-0"))
    assert not assumed
