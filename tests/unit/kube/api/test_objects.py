"""Objects of the API, decoded from its JSON."""

from hodei.kube.api.objects import Claim, CsiNode, Node, Pod, PodDisruptionBudget, decode


def test_fields_that_scheduling_does_not_read_are_skipped():
    pod = decode(
        b'{"kind":"Pod","metadata":{"name":"a","managedFields":[{"x":1}]},"spec":{"dnsPolicy":"Default","containers":'
        b'[{"name":"c","ports":[{"hostPort":80,"hostIP":"1.2.3.4"}],"livenessProbe":{"exec":{}}}]}}',
        Pod,
    )
    assert pod.metadata.name == "a"
    assert pod.spec.containers[0].ports[0].host_ip == "1.2.3.4"


def test_null_lists_and_maps_count_as_absent():
    pod = decode(
        b'{"metadata":{"creationTimestamp":null,"labels":null},"spec":{"containers":null,"affinity":{"nodeAffinity":null},'
        b'"tolerations":[{"key":"a","tolerationSeconds":null}]}}',
        Pod,
    )
    assert pod.spec.containers == ()
    assert pod.spec.tolerations[0].toleration_seconds is None


def test_long_names_of_affinity_are_read():
    pod = decode(
        b'{"spec":{"affinity":{"podAntiAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":[{"topologyKey":"z"}]}}}}',
        Pod,
    )
    assert pod.spec.affinity.pod_anti_affinity.required[0].topology_key == "z"


def test_other_kinds():
    assert decode(b'{"spec":{"providerID":"aws:///i-1","unschedulable":true}}', Node).spec.unschedulable
    assert decode(b'{"status":{"disruptionsAllowed":2}}', PodDisruptionBudget).status.disruptions_allowed == 2
    claim = decode(
        b'{"metadata":{"annotations":{"pv.kubernetes.io/bind-completed":"yes"}},"spec":{"volumeName":"pv"}}', Claim
    )
    assert claim.bound
    drivers = decode(
        b'{"spec":{"drivers":[{"name":"d","nodeID":"x","allocatable":{"count":3}}]}}', CsiNode
    ).spec.drivers
    assert (drivers[0].name, drivers[0].allocatable.count) == ("d", 3)
