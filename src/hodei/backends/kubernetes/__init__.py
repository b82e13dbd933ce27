"""A Kubernetes cluster as a backend: every run is a pod, every node of the cluster a node.

`manifest` turns an order into a pod, `runs` the state of a pod into an observation, `nodes` the cluster's nodes into ours;
`pod_api` sends requests, `supervision` takes checkpoints and checks files in containers, `backend` puts it together.
"""

from hodei.backends.kubernetes.backend import KubernetesBackend, make
from hodei.backends.kubernetes.manifest import Settings

__all__ = ["KubernetesBackend", "Settings", "make"]
