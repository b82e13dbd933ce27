"""An order as a pod. Pure.

The pod's name is made from the run's, so that a second order for the same run meets the first; a finalizer keeps it until
its end is safely stored, so that nobody's deletion can make an exit code unknown. Values go into JSON as they are: no
command line, no shell.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, structs

from hodei.backends.base import check_container_command, run_env
from hodei.kube.api.client import Access
from hodei.model.affinity import HostPort
from hodei.model.effects import Start
from hodei.model.errors import BackendRefused, InvalidInput
from hodei.model.ids import RunId
from hodei.model.job import NODE_HOST, Checkpoint, HealthCheck, JobSpec, Toleration
from hodei.model.resources import CPU, GPU, MEMORY, STORAGE, Resources, parse_duration_ms

_NAMESPACE = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_PREFIX = re.compile(r"[a-z0-9][-a-z0-9.]{0,62}|")


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """`kubeconfig`, `context`: which cluster ("" for $KUBECONFIG, ~/.kube/config, or the one that this runs in).
    `namespace`: where pods are made. `image`: for tasks that name none (empty: those are refused). `node_selector`: the
    nodes that may be used; `node_prefix`: put before their names here, for clusters whose nodes are called the same.
    `scheduler`: "" and the pod names its node itself; else that scheduler is asked to put it there. `gpu`: the resource
    that a GPU is. `pull_patience`: how long an image may fail to come, or that scheduler may take, before the run is
    given up. `pod_labels`, `pod_annotations`: put on every pod; `allow_annotations`: which ones jobs may put on theirs, by
    whole name or, with a `/` at the end, by prefix. `restricted`: pods keep the rules of the Pod Security Standard of that
    name."""

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
    pull_patience: str = "2m"

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
        raise _wrong(name, "node_prefix", f"{settings.node_prefix[:80]!r} cannot begin a node's name", '"prod-"')
    if not settings.gpu:
        raise _wrong(name, "gpu", "the resource that a GPU is has no name", 'gpu = "nvidia.com/gpu"')
    for key in (*settings.pod_labels, *settings.pod_annotations, *settings.allow_annotations):
        if key.startswith(("hodei.io/", "job.hodei.io/")):
            raise _wrong(name, "pod_labels", f"{key} is Hodei's own", "choose another prefix than hodei.io/")
    try:
        parse_duration_ms(settings.pull_patience)
    except InvalidInput as error:
        raise _wrong(name, "pull_patience", error.message, 'pull_patience = "2m"') from None


def _wrong(name: str, key: str, text: str, hint: str) -> InvalidInput:
    path = f"backends.{name}.{key}"
    return InvalidInput(f"{path}: {text}", hint=hint, problems=((path, text),))


# ------------------------------------------------------------------------------------- pod annotations
# What a job asks for while it runs, as far as its pod must remember it: how its work is saved, how its health is
# seen. Pure.


CHECKPOINT_DIR = "/run/hodei"
CHECKPOINT_FILE = f"{CHECKPOINT_DIR}/checkpoint"
_HERE = ("localhost", "127.0.0.1", "::1", NODE_HOST)


class Care(Struct, frozen=True, omit_defaults=True):
    """Kept on the pod as JSON. `file`: whose time of change says when work was saved. `save`: its hook, if it has one.
    `grace_ms`: between TERM and KILL, for stops that nobody orders."""

    file: str = ""
    save: Checkpoint | None = None
    health: HealthCheck | None = None
    grace_ms: int = 0

    @property
    def probed(self) -> HealthCheck | None:
        """A health check that the kubelet carries out."""
        return self.health if self.health is not None and not self.health.file else None


def care_for(order: Start) -> Care | None:
    """None if the job asks for nothing of this kind."""
    spec, checkpoint = order.spec, order.spec.checkpoint
    asked = checkpoint != Checkpoint()
    if not asked and not spec.health.enabled:
        return None
    health = spec.health
    if health.file:
        health = HealthCheck((), "", _absolute(health.file, order), *_times(health))
    return Care(
        file=(_absolute(checkpoint.file, order) if checkpoint.file else CHECKPOINT_FILE) if asked else "",
        save=checkpoint if checkpoint.has_hook else None,
        health=health if health.enabled else None,
        grace_ms=spec.grace_ms,
    )


def probe(health: HealthCheck, command: list[str]) -> dict[str, Any]:
    """As a pod has it. `command`: its words as Kubernetes reads them. BackendRefused for an address of another host."""
    times = {
        "initialDelaySeconds": _seconds(health.after_ms + health.every_ms),
        "periodSeconds": _seconds(health.every_ms),
        "timeoutSeconds": _seconds(health.timeout_ms),
        "failureThreshold": max(1, health.failures),
    }
    if command:
        return {"exec": {"command": command}, **times}
    at = urlsplit(health.http)
    if at.scheme != "http" or at.hostname not in _HERE:
        raise BackendRefused(
            f"a pod's health cannot be seen at {health.http[:200]}",
            hint="write http://localhost:PORT/PATH: the node asks the address of the pod, so listen on all addresses there",
        )
    path = (at.path or "/") + (f"?{at.query}" if at.query else "")
    return {"httpGet": {"path": path, "port": at.port or 80, "scheme": "HTTP"}, **times}


def _times(health: HealthCheck) -> tuple[int, int, int, int]:
    return health.every_ms, health.timeout_ms, health.after_ms, health.failures


def _absolute(path: str, order: Start) -> str:
    return path if path.startswith("/") else f"{order.task.workdir.rstrip('/')}/{path}"


def _seconds(ms: int) -> int:
    return max(1, math.ceil(ms / 1000))


# ----------------------------------------------------------------------------------------------------

INSTALLATION, BACKEND, RUN, JOB = (f"hodei.io/{name}" for name in ("installation", "backend", "run", "job"))
JOB_NAME, TIMEOUT, END, CARE = (f"hodei.io/{name}" for name in ("job-name", "timeout-ms", "end", "care"))
# Labels that a job gave itself; never without this before them, so that no Service or policy takes the pod for another's.
JOB_LABEL = "job.hodei.io/"
FINALIZER = "hodei.io/observed"
MAIN = "main"
WHOLE_GPU = 1000
_RUN_ID = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,38}[a-z0-9])?")
_NAME_PART = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
# Of these a pod may use more than it asks for, or less than it may; of all others Kubernetes wants both the same.
_ELASTIC = (CPU, MEMORY, STORAGE)


def pod_name(installation: str, run: RunId) -> str:
    """Of one run of one installation; two installations in one namespace never meet."""
    mark = hashlib.sha256(installation.encode()).hexdigest()[:8]
    plain = run.replace(".", "-") if _RUN_ID.fullmatch(run) else hashlib.sha256(run.encode()).hexdigest()[:40]
    return f"hodei-{mark}-{plain}"


def own_labels(installation: str, backend: str) -> dict[str, str]:
    """By which our pods are told from all others."""
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
    # Which devices a pod has is for its node to say: numbers chosen here would be those of others.
    env = {**task.env, **run_env(structs.replace(order, run=structs.replace(run, grant=None)))}
    care = care_for(order)
    if care is not None and care.file:
        env["HODEI_CHECKPOINT_FILE"] = care.file
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
    if care is not None and care.probed is not None:
        container["readinessProbe"] = probe(care.probed, [_literal(word) for word in care.probed.command])
    grace_s = max(1, math.ceil(spec.grace_ms / 1000))
    pod = {**_placed(order, settings), **_dressed(settings), "terminationGracePeriodSeconds": grace_s}
    pod["containers"] = [container]
    if care is not None and care.file == CHECKPOINT_FILE:
        # A place that the command may write to, whoever it runs as.
        pod["volumes"] = [{"name": "hodei", "emptyDir": {}}]
        container["volumeMounts"] = [{"name": "hodei", "mountPath": CHECKPOINT_DIR}]
    annotations = {
        **settings.pod_annotations,
        **{key: value for key, value in spec.annotations.items() if settings.allows(key)},
        JOB_NAME: spec.name,
    }
    if spec.timeout_ms:
        annotations[TIMEOUT] = str(spec.timeout_ms)
    if care is not None:
        annotations[CARE] = msgspec.json.encode(care).decode()
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


def _placed(order: Start, settings: Settings) -> dict[str, Any]:
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
    """The node's own, which the house gives to one run at a time; the container listens on the same."""
    return {"containerPort": one.port, "hostPort": one.port, "protocol": one.protocol, "hostIP": one.ip}


def _dressed(settings: Settings) -> dict[str, Any]:
    """What all pods of this backend have."""
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
    """What it asks for is what it gets; what it may take at most is what it says."""
    rigid = {name: amount for name, amount in request.items() if name not in _ELASTIC}
    return {"requests": _amounts(request, settings), "limits": _amounts({**limits, **rigid}, settings)}


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
    """A prefix of their own, such as `example.com/team`, becomes a part of the name: Kubernetes takes one `/` only."""
    out = {}
    for key, value in spec.labels.items():
        name = key.replace("/", ".")
        if _NAME_PART.fullmatch(name):
            out[JOB_LABEL + name] = label_value(value)
    return out


def _literal(text: str) -> str:
    """Kubernetes reads $(NAME) in commands and values; twice the sign is the sign itself."""
    return text.replace("$", "$$")


def label_value(text: str) -> str:
    """Letters, digits and a few signs, of limited length. What does not fit is told apart by its sum."""
    if not text or _NAME_PART.fullmatch(text):
        return text
    return hashlib.sha256(text.encode()).hexdigest()[:63]
