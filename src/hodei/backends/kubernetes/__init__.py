"""A Kubernetes cluster as a backend: every run is a pod, every node of the cluster a node.

`manifest` turns an order into a pod, `states` what the cluster says of a pod into an observation, `nodes` its nodes and the
pods of others into ours; `runs` remembers; `asking` and `logs` ask; `backend` puts it together.
"""

from hodei.backends.kubernetes.backend import KubernetesBackend, make
from hodei.backends.kubernetes.manifest import Settings

__all__ = ["KubernetesBackend", "Settings", "make"]
