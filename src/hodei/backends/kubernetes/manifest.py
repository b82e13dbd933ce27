"""The settings of kind kubernetes, and an order as the manifest of a pod. No I/O.

The pod's name is derived from the run's, so that a second order for the same run conflicts with the first; a finalizer keeps
the pod until its end is stored, so that no deletion loses an exit code. Values go into JSON as they are: no command line,
no shell.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, structs

from hodei.backends.base import WHOLE_GPU, absolute_path, check_container_command, run_env
from hodei.kube.api.client import Access
from hodei.model.affinity import HostPort
from hodei.model.config import Span
from hodei.model.effects import Start
from hodei.model.errors import BackendRefused, InvalidInput
from hodei.model.ids import RunId
from hodei.model.job import NODE_HOST, Checkpoint, HealthCheck, JobSpec, Toleration
from hodei.model.resources import CPU, GPU, MEMORY, STORAGE, Resources, parse_duration_ms

_NAMESPACE = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_PREFIX = re.compile(r"[a-z0-9][-a-z0-9.]{0,62}|")


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """`kubeconfig`, `context`: the cluster ("" for $KUBECONFIG, ~/.kube/config, or the one that the server runs in).
    `namespace` of the pods. `image`: default for tasks without one (empty: those are refused). `node_selector`: the nodes to
    use; `node_prefix`: prefix of their names here, for clusters with equal node names. `scheduler`: "" binds the pod to its
    node directly; else that scheduler places it there. `gpu`: the resource name of a GPU. `pull_timeout`: how long an image
    pull may fail, or that scheduler may take, before the run fails. `pod_labels`, `pod_annotations`: for every pod;
    `allow_annotations`: those that jobs may set, by name or, with a `/` at the end, by prefix. `restricted`: pods follow the
    Pod Security Standard of that name."""

    kubeconfig: str = ""
    context: str = ""
    namespace: str = "default"
    image: str = ""
    node_selector: dict[str, str] = {}
    node_prefix: str = ""
    scheduler: str = ""
    service_account: str = ""
    runtime_class: str = ""
    image_pull_secrets: tuple[str, ...] = ()
    image_pull_policy: Literal["", "Always", "IfNotPresent", "Never"] = ""
    pod_labels: dict[str, str] = {}
    pod_annotations: dict[str, str] = {}
    allow_annotations: tuple[str, ...] = ()
    restricted: bool = False
    gpu: str = "nvidia.com/gpu"
    pull_timeout: Span = "2m"

    @property
    def access(self) -> Access:
        return Access(self.kubeconfig, self.context)

    def allows(self, annotation: str) -> bool:
        return any(
            annotation.startswith(name) if name.endswith("/") else annotation == name for name in self.allow_annotations
        )


def check(name: str, settings: Settings) -> None:
    """InvalidInput names the key that is wrong."""
    if not _NAMESPACE.fullmatch(settings.namespace):
        raise _wrong(name, "namespace", f"{settings.namespace[:80]!r} is not a namespace", 'namespace = "hodei-jobs"')
    if not _PREFIX.fullmatch(settings.node_prefix):
        raise _wrong(
            name, "node_prefix", f"{settings.node_prefix[:80]!r} is not a valid prefix of a node name", '"prod-"'
        )
    if not settings.gpu:
        raise _wrong(name, "gpu", "the resource name of a GPU is empty", 'gpu = "nvidia.com/gpu"')
    for key in (*settings.pod_labels, *settings.pod_annotations, *settings.allow_annotations):
        if key.startswith(("hodei.io/", "job.hodei.io/")):
            raise _wrong(name, "pod_labels", f"{key} is reserved for Hodei", "choose another prefix than hodei.io/")
    try:
        parse_duration_ms(settings.pull_timeout)
    except InvalidInput as error:
        raise _wrong(name, "pull_timeout", error.message, 'pull_timeout = "2m"') from None


def _wrong(name: str, key: str, text: str, hint: str) -> InvalidInput:
    path = f"backends.{name}.{key}"
    return InvalidInput(f"{path}: {text}", hint=hint, problems=((path, text),))


CHECKPOINT_DIR = "/run/hodei"
CHECKPOINT_FILE = f"{CHECKPOINT_DIR}/checkpoint"
_OWN_HOSTS = ("localhost", "127.0.0.1", "::1", NODE_HOST)


class Supervision(Struct, frozen=True, omit_defaults=True):
    """What to supervise in a run; kept on the pod as JSON. `file`: the checkpoint file. `save`: the hook, if any. `grace_ms`:
    between TERM and KILL, for stops without an order."""

    file: str = ""
    save: Checkpoint | None = None
    health: HealthCheck | None = None
    grace_ms: int = 0

    @property
    def probed(self) -> HealthCheck | None:
        """The health check, if the kubelet carries it out."""
        return self.health if self.health is not None and not self.health.file else None


def supervision_for(order: Start) -> Supervision | None:
    """None without checkpoints and health check."""
    spec, checkpoint = order.spec, order.spec.checkpoint
    takes_checkpoints = checkpoint != Checkpoint()
    if not takes_checkpoints and not spec.health.enabled:
        return None
    health = spec.health
    if health.file:
        health = structs.replace(health, file=absolute_path(health.file, order))
    return Supervision(
        file=(absolute_path(checkpoint.file, order) if checkpoint.file else CHECKPOINT_FILE)
        if takes_checkpoints
        else "",
        save=checkpoint if checkpoint.has_hook else None,
        health=health if health.enabled else None,
        grace_ms=spec.grace_ms,
    )


def probe(health: HealthCheck, command: list[str]) -> dict[str, Any]:
    """A readiness probe. `command`: escaped for Kubernetes. BackendRefused for an address of another host."""
    times = {
        "initialDelaySeconds": _seconds(health.after_ms + health.every_ms),
        "periodSeconds": _seconds(health.every_ms),
        "timeoutSeconds": _seconds(health.timeout_ms),
        "failureThreshold": max(1, health.failures),
    }
    if command:
        return {"exec": {"command": command}, **times}
    at = urlsplit(health.http)
    if at.scheme != "http" or at.hostname not in _OWN_HOSTS:
        raise BackendRefused(
            f"a pod's health cannot be checked at {health.http[:200]}",
            hint="write http://localhost:PORT/PATH: the node calls the address of the pod, so listen on all addresses",
        )
    path = (at.path or "/") + (f"?{at.query}" if at.query else "")
    return {"httpGet": {"path": path, "port": at.port or 80, "scheme": "HTTP"}, **times}


def _seconds(ms: int) -> int:
    return max(1, math.ceil(ms / 1000))


INSTALLATION, BACKEND, RUN, JOB = (f"hodei.io/{name}" for name in ("installation", "backend", "run", "job"))
JOB_NAME, TIMEOUT, END, SUPERVISION = (f"hodei.io/{name}" for name in ("job-name", "timeout-ms", "end", "supervision"))
# Prefix for the labels of a job, so that no Service or policy selects the pod by mistake.
JOB_LABEL = "job.hodei.io/"
FINALIZER = "hodei.io/observed"
MAIN = "main"
_RUN_ID = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,38}[a-z0-9])?")
_NAME_PART = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
# Requests and limits may differ for these; for all other resources Kubernetes requires both to be equal.
_ELASTIC = (CPU, MEMORY, STORAGE)


def pod_name(installation: str, run: RunId) -> str:
    """Unique per run and installation, also for several installations in one namespace."""
    prefix = hashlib.sha256(installation.encode()).hexdigest()[:8]
    suffix = run.replace(".", "-") if _RUN_ID.fullmatch(run) else hashlib.sha256(run.encode()).hexdigest()[:40]
    return f"hodei-{prefix}-{suffix}"


def own_labels(installation: str, backend: str) -> dict[str, str]:
    """The labels that identify our pods."""
    return {INSTALLATION: label_value(installation), BACKEND: label_value(backend)}


def manifest(order: Start, backend: str, installation: str, settings: Settings) -> dict[str, Any]:
    """BackendRefused if it can never run as a pod."""
    run, spec, task = order.run, order.spec, order.task
    image = task.image or settings.image
    if not image:
        raise BackendRefused(
            "the task names no image, and this backend has none for such tasks",
            hint=f"give it an `image`, or set backends.{backend}.image",
        )
    if run.grant is not None and any(share != WHOLE_GPU for _, share in run.grant.gpus):
        raise BackendRefused("a pod gets whole GPUs only", hint="ask for whole ones, or choose another backend")
    # The kubelet chooses the devices of a pod: numbers chosen here could be those of others.
    env = {**task.env, **run_env(structs.replace(order, run=structs.replace(run, grant=None)))}
    supervision = supervision_for(order)
    if supervision is not None and supervision.file:
        env["HODEI_CHECKPOINT_FILE"] = supervision.file
    check_container_command(task.command, env, task.workdir)
    container: dict[str, Any] = {
        "name": MAIN,
        "image": image,
        "env": [{"name": name, "value": _literal(value)} for name, value in sorted(env.items())],
        "resources": _resources(task.request, task.limits, settings),
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    if settings.image_pull_policy:
        container["imagePullPolicy"] = settings.image_pull_policy
    if task.ports:
        container["ports"] = [_port(one) for one in task.ports]
    if task.command:
        container["command"] = [_literal(word) for word in task.command]
    if task.workdir:
        container["workingDir"] = task.workdir
    if settings.restricted:
        container["securityContext"]["capabilities"] = {"drop": ["ALL"]}
    if supervision is not None and supervision.probed is not None:
        container["readinessProbe"] = probe(supervision.probed, [_literal(word) for word in supervision.probed.command])
    grace_s = max(1, math.ceil(spec.grace_ms / 1000))
    pod = {**_placement(order, settings), **_pod_defaults(settings), "terminationGracePeriodSeconds": grace_s}
    pod["containers"] = [container]
    if supervision is not None and supervision.file == CHECKPOINT_FILE:
        # Writable for every user in the container.
        pod["volumes"] = [{"name": "hodei", "emptyDir": {}}]
        container["volumeMounts"] = [{"name": "hodei", "mountPath": CHECKPOINT_DIR}]
    annotations = {
        **settings.pod_annotations,
        **{key: value for key, value in spec.annotations.items() if settings.allows(key)},
        JOB_NAME: spec.name,
    }
    if spec.timeout_ms:
        annotations[TIMEOUT] = str(spec.timeout_ms)
    if supervision is not None:
        annotations[SUPERVISION] = msgspec.json.encode(supervision).decode()
    labels = {
        **settings.pod_labels,
        **_job_labels(spec),
        **own_labels(installation, backend),
        RUN: label_value(run.id),
        JOB: str(run.job),
        "hodei.io/project": label_value(spec.project),
    }
    meta = {
        "name": pod_name(installation, run.id),
        "namespace": settings.namespace,
        "labels": labels,
        "annotations": annotations,
        "finalizers": [FINALIZER],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod}


def _placement(order: Start, settings: Settings) -> dict[str, Any]:
    node = order.run.node.removeprefix(settings.node_prefix)
    pod: dict[str, Any] = {"tolerations": [_toleration(one) for one in order.task.tolerations]}
    if not settings.scheduler:
        return {**pod, "nodeName": node}
    here = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [here]}}
    return {**pod, "schedulerName": settings.scheduler, "affinity": {"nodeAffinity": required}}


def _toleration(one: Toleration) -> dict[str, Any]:
    given = {"key": one.key, "operator": one.operator, "value": one.value, "effect": one.effect}
    out: dict[str, Any] = {name: value for name, value in given.items() if value}
    if one.seconds is not None and one.effect == "NoExecute":
        out["tolerationSeconds"] = one.seconds
    return out


def _port(one: HostPort) -> dict[str, Any]:
    """A host port, which the scheduler gives to one run at a time; the container listens on the same port."""
    return {"containerPort": one.port, "hostPort": one.port, "protocol": one.protocol, "hostIP": one.ip}


def _pod_defaults(settings: Settings) -> dict[str, Any]:
    """The same for all pods of this backend."""
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": bool(settings.service_account),
        "enableServiceLinks": False,
    }
    if settings.service_account:
        pod["serviceAccountName"] = settings.service_account
    if settings.runtime_class:
        pod["runtimeClassName"] = settings.runtime_class
    if settings.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    if settings.restricted:
        pod["securityContext"] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    return pod


def _resources(request: Resources, limits: Resources, settings: Settings) -> dict[str, dict[str, str]]:
    equal = {name: amount for name, amount in request.items() if name not in _ELASTIC}
    return {"requests": _amounts(request, settings), "limits": _amounts({**limits, **equal}, settings)}


def _amounts(given: Resources, settings: Settings) -> dict[str, str]:
    out = {}
    for name, amount in given.items():
        if not amount:
            continue
        if name == GPU:
            out[settings.gpu] = str(math.ceil(amount / WHOLE_GPU))
        else:
            out[name] = f"{amount}m" if name == CPU else str(amount)
    return out


def _job_labels(spec: JobSpec) -> dict[str, str]:
    """A prefix, such as `example.com/` of `example.com/team`, becomes a part of the name: Kubernetes allows only one `/`."""
    out = {}
    for key, value in spec.labels.items():
        name = key.replace("/", ".")
        if _NAME_PART.fullmatch(name):
            out[JOB_LABEL + name] = label_value(value)
    return out


def _literal(text: str) -> str:
    """Escape $(NAME), which Kubernetes expands in commands and values."""
    return text.replace("$", "$$")


def label_value(text: str) -> str:
    """A valid label value: the text itself, or its hash if it has other characters or is too long."""
    if not text or _NAME_PART.fullmatch(text):
        return text
    return hashlib.sha256(text.encode()).hexdigest()[:63]
