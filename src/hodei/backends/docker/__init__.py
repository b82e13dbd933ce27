"""Docker hosts, one or many, as one backend: every run is a container, every host a node.

`backend` routes orders to hosts; `host` tracks the runs of one host; `engine` speaks Docker's API and keeps the connection;
`container_spec` turns an order into a create request, or refuses it; `start` and `supervision` start, check and stop runs.
"""

from hodei.backends.docker.backend import DockerBackend, make
from hodei.backends.docker.settings import Settings, check

__all__ = ["DockerBackend", "Settings", "check", "make"]
