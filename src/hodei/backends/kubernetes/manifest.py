"""An order as a pod. Pure.

The pod's name is made from the run's, so that a second order for the same run meets the first; a finalizer keeps it until
its end is safely stored, so that nobody's deletion can make an exit code unknown. Values go into JSON as they are: no
command line, no shell.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any

import msgspec
from msgspec import structs

from hodei.backends.kubernetes.pod_annotations import CHECKPOINT_DIR, CHECKPOINT_FILE, care_for, probe
from hodei.backends.kubernetes.settings import Settings
from hodei.backends.local_order import check_size, check_words, own_env
from hodei.model.effects import Start
from hodei.model.errors import BackendRefused
from hodei.model.ids import RunId
from hodei.model.job import JobSpec, Toleration
from hodei.model.job_affinity import HostPort
from hodei.model.resources import CPU, GPU, MEMORY, STORAGE, Resources

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
    env = {**task.env, **own_env(structs.replace(order, run=structs.replace(run, grant=None)))}
    care = care_for(order)
    if care is not None and care.file:
        env["HODEI_CHECKPOINT_FILE"] = care.file
    check_words(task.command, env, task.workdir)
    check_size(task.command, env)
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
