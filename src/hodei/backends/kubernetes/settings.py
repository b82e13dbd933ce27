"""The keys of a table `[backends.NAME]` of kind kubernetes."""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct

from hodei.kube.api.client import Access
from hodei.model.errors import InvalidInput
from hodei.model.quantity import parse_duration_ms

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
