"""Manifests of pods: fields and refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec import structs

from builders import a_job_spec, a_run
from hodei.backends.kubernetes.manifest import FINALIZER, Settings, check, label_value, manifest, own_labels, pod_name
from hodei.model.affinity import HostPort
from hodei.model.effects import Start
from hodei.model.errors import BackendRefused, InvalidInput
from hodei.model.job import Checkpoint, HealthCheck, Toleration
from hodei.model.node import Grant

LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?|")
POD_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def a_pod(settings: Settings | None = None, run: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    fields.setdefault("image", "busybox")
    spec = a_job_spec("train", **fields)
    order = Start(run=a_run(7, **(run or {})), spec=spec, task=spec.tasks[0])
    return manifest(order, "prod", "install-1", settings or Settings())


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def env_of(pod: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container_of(pod)["env"]}


def test_a_run_becomes_a_pod_that_runs_once_on_its_node():
    pod = a_pod(command=("train", "--fast"), workdir="/data", run={"node": "n7"}, grace_ms=2500)
    container = container_of(pod)
    assert (container["image"], container["command"], container["workingDir"]) == (
        "busybox", ["train", "--fast"], "/data",
    )  # fmt: skip
    spec = pod["spec"]
    assert (spec["nodeName"], spec["restartPolicy"], spec["terminationGracePeriodSeconds"]) == ("n7", "Never", 3)
    assert pod["metadata"]["finalizers"] == [FINALIZER]
    assert pod["metadata"]["annotations"]["hodei.io/job-name"] == "train"
    assert "activeDeadlineSeconds" not in spec  # set when it runs, not during the image pull


def test_a_pod_gets_no_service_account_token_and_no_privileges():
    spec = a_pod()["spec"]
    assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
    assert container_of(a_pod())["securityContext"] == {"allowPrivilegeEscalation": False}


def test_a_restricted_backend_follows_the_pod_security_standard():
    pod = a_pod(Settings(restricted=True))
    assert pod["spec"]["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container_of(pod)["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_another_scheduler_gets_an_affinity_for_the_node():
    spec = a_pod(Settings(scheduler="hodei", node_prefix="prod-"), run={"node": "prod-n7"})["spec"]
    assert spec["schedulerName"] == "hodei"
    assert "nodeName" not in spec
    (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchFields"] == [{"key": "metadata.name", "operator": "In", "values": ["n7"]}]


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        pytest.param("plain", "plain", id="nothing to escape"),
        pytest.param("$HOME", "$$HOME", id="a variable"),
        pytest.param("$(HOME)", "$$(HOME)", id="a variable of Kubernetes"),
        pytest.param("$$", "$$$$", id="escaped already"),
        pytest.param("100%s `id` \\ \"'\n é", "100%s `id` \\ \"'\n é", id="shell syntax"),
    ],
)
def test_arguments_and_values_reach_the_program_unchanged(text, escaped):
    pod = a_pod(command=("echo", text), env={"TEXT": text})
    assert container_of(pod)["command"] == ["echo", escaped]
    assert env_of(pod)["TEXT"] == escaped


def test_a_job_cannot_override_the_variables_of_hodei():
    env = env_of(a_pod(env={"HODEI_RANK": "99", "OWN": "yes"}, project="ml", run={"node": "n7"}))
    assert (env["HODEI_RUN_ID"], env["HODEI_JOB_ID"], env["HODEI_RANK"], env["HODEI_NODE"]) == ("7.0.1", "7", "0", "n7")
    assert (env["HODEI_PROJECT"], env["OWN"]) == ("ml", "yes")


def test_device_numbers_are_left_to_the_kubelet():
    pod = a_pod(gpu="2", run={"grant": Grant(gpus=((2, 1000), (3, 1000)))})
    assert container_of(pod)["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert not {"CUDA_VISIBLE_DEVICES", "HODEI_GPUS"} & env_of(pod).keys()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"image": ""}, "names no image", id="no image"),
        pytest.param({"command": ("echo", "a\0b")}, "NUL", id="a NUL in the command"),
        pytest.param({"env": {"A=B": "hidden"}}, "'A=B' cannot be set", id="an invalid name of a variable"),
        pytest.param({"env": {"A": "hidden\0"}}, "'A' cannot be set", id="a NUL in a value"),
        pytest.param({"workdir": "here"}, "not an absolute path", id="a relative directory"),
        pytest.param(
            {"command": ("x" * 200_000,)}, "the system takes", id="an argument beyond the limit of the kernel"
        ),
        pytest.param({"run": {"grant": Grant(gpus=((0, 500),))}}, "whole GPUs", id="half a GPU"),
    ],
)
def test_an_impossible_order_is_refused_without_a_request(fields, message):
    with pytest.raises(BackendRefused, match=message) as refusal:
        a_pod(**fields)
    assert "hidden" not in f"{refusal.value.message}{refusal.value.hint}"


def test_amounts_use_the_units_of_kubernetes():
    pod = a_pod(
        Settings(gpu="amd.com/gpu"), cpu="1500m", memory="1Gi", gpu="1", limits={"cpu": 2000, "memory": 2**31},
        request={"example.com/fpga": 2, "ephemeral-storage": "1Gi"},
    )  # fmt: skip
    assert container_of(pod)["resources"] == {
        "requests": {"cpu": "1500m", "memory": str(2**30), "amd.com/gpu": "1", "example.com/fpga": "2",
                     "ephemeral-storage": str(2**30)},
        "limits": {"cpu": "2000m", "memory": str(2**31), "amd.com/gpu": "1", "example.com/fpga": "2"},
    }  # fmt: skip


def test_long_names_are_valid_and_distinct():
    names = [pod_name("i" * 300, run) for run in ("1.0.1", "9" * 18 + ".100000.100000", "X" * 200, "a..b-")]
    assert all(POD_NAME.fullmatch(name) for name in names), names
    assert len(set(names)) == len(names)


def test_two_installations_in_one_namespace_have_different_pod_names():
    assert pod_name("one", "1.0.1") != pod_name("two", "1.0.1")
    assert own_labels("one", "prod") != own_labels("two", "prod") != own_labels("two", "test")


@pytest.mark.parametrize(
    "text", ["", "plain", "a.b-c_d", "-begins", "ends-", "x" * 64, "with space", "é", "a/b", "\n"], ids=repr
)
def test_label_values_are_valid_and_distinct(text):
    assert LABEL_VALUE.fullmatch(label_value(text))
    assert label_value(text) != label_value(text + "!")


def test_a_pod_has_the_labels_of_its_job_and_of_the_operator_and_those_of_hodei_cannot_be_forged():
    labels = a_pod(
        Settings(pod_labels={"cost-centre": "42", "app": "x"}),
        labels={"team": "ml", "example.com/tier": "gold", "hodei.io/run": "99.9.9"},
    )["metadata"]["labels"]
    assert labels["cost-centre"] == "42"
    assert (labels["job.hodei.io/team"], labels["job.hodei.io/example.com.tier"]) == ("ml", "gold")
    assert (labels["hodei.io/run"], labels["hodei.io/job"], labels["hodei.io/backend"]) == ("7.0.1", "7", "prod")
    assert all(LABEL_VALUE.fullmatch(value) for value in labels.values())


def test_jobs_set_only_annotations_that_the_operator_allows():
    annotations = {"example.com/a": "1", "example.com/b": "2", "sidecar.io/inject": "true", "hodei.io/end": "{}"}
    settings = Settings(allow_annotations=("example.com/", "other"), pod_annotations={"by": "operator"})
    assert a_pod(settings, annotations=annotations)["metadata"]["annotations"] == {
        "example.com/a": "1", "example.com/b": "2", "by": "operator", "hodei.io/job-name": "train",
    }  # fmt: skip


def test_tolerations_are_passed_on():
    tolerations = (Toleration("gpu", "Exists"), Toleration("a", "Equal", "b", "NoExecute", seconds=30))
    assert a_pod(tolerations=tolerations)["spec"]["tolerations"] == [
        {"key": "gpu", "operator": "Exists"},
        {"key": "a", "operator": "Equal", "value": "b", "effect": "NoExecute", "tolerationSeconds": 30},
    ]


def test_ports_are_those_of_the_node():
    pod = a_pod(ports=(HostPort(8080), HostPort(53, "UDP", "10.0.0.1")))
    assert container_of(pod)["ports"] == [
        {"containerPort": 8080, "hostPort": 8080, "protocol": "TCP", "hostIP": "0.0.0.0"},
        {"containerPort": 53, "hostPort": 53, "protocol": "UDP", "hostIP": "10.0.0.1"},
    ]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        pytest.param({"namespace": ""}, "backends.prod.namespace", id="no namespace"),
        pytest.param({"namespace": "../kube-system"}, "backends.prod.namespace", id="an invalid namespace"),
        pytest.param({"node_prefix": "A b"}, "backends.prod.node_prefix", id="an invalid prefix"),
        pytest.param({"pull_timeout": "soon"}, "backends.prod.pull_timeout", id="an invalid duration"),
        pytest.param({"gpu": ""}, "backends.prod.gpu", id="a GPU without a name"),
        pytest.param({"allow_annotations": ("hodei.io/",)}, "backends.prod.pod_labels", id="annotations of hodei"),
    ],
)
def test_an_invalid_setting_is_named(fields, path):
    with pytest.raises(InvalidInput) as refusal:
        check("prod", structs.replace(Settings(), **fields))
    assert refusal.value.problems[0][0] == path


def test_a_job_without_supervision_gets_no_probe_no_volume_and_no_annotation():
    pod = a_pod()
    assert "readinessProbe" not in container_of(pod)
    assert "volumes" not in pod["spec"]
    assert "hodei.io/supervision" not in pod["metadata"]["annotations"]
    assert "HODEI_CHECKPOINT_FILE" not in env_of(pod)


def test_a_health_command_is_a_probe_in_whole_seconds_with_literal_arguments():
    check = HealthCheck(command=("look", "$(HOME)"), every_ms=1500, timeout_ms=200, after_ms=2000, failures=4)
    assert container_of(a_pod(health=check))["readinessProbe"] == {
        "exec": {"command": ["look", "$$(HOME)"]},
        "initialDelaySeconds": 4, "periodSeconds": 2, "timeoutSeconds": 1, "failureThreshold": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("http", "path", "port"),
    [
        ("http://localhost:8080/live?x=1", "/live?x=1", 8080),
        ("http://node/", "/", 80),
        ("http://127.0.0.1:99", "/", 99),
    ],
)
def test_an_http_health_check_is_a_probe_of_the_pod(http, path, port):
    found = container_of(a_pod(health=HealthCheck(http=http)))["readinessProbe"]["httpGet"]
    assert found == {"path": path, "port": port, "scheme": "HTTP"}


@pytest.mark.parametrize("http", ["http://169.254.169.254/", "http://example.com/", "https://localhost/", "http:///x"])
def test_health_at_another_host_is_refused(http):
    with pytest.raises(BackendRefused, match="health"):
        a_pod(health=HealthCheck(http=http))


def test_a_heartbeat_file_needs_no_probe():
    pod = a_pod(health=HealthCheck(file="beat"), workdir="/data")
    assert "readinessProbe" not in container_of(pod)
    assert '"file":"/data/beat"' in pod["metadata"]["annotations"]["hodei.io/supervision"]


def test_a_job_with_checkpoints_gets_a_writable_checkpoint_file():
    pod = a_pod(checkpoint=Checkpoint(signal="USR1"))
    assert env_of(pod)["HODEI_CHECKPOINT_FILE"] == "/run/hodei/checkpoint"
    (mount,), (volume,) = container_of(pod)["volumeMounts"], pod["spec"]["volumes"]
    assert (mount["mountPath"], mount["name"], volume["emptyDir"]) == ("/run/hodei", volume["name"], {})
    own = a_pod(checkpoint=Checkpoint(signal="USR1", file="own"), workdir="/data")
    assert env_of(own)["HODEI_CHECKPOINT_FILE"] == "/data/own"
    assert "volumes" not in own["spec"]
