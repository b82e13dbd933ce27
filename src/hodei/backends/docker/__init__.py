"""Docker hosts, one or many, as one backend: every run is a container, every host a node.

`backend` routes orders to hosts; `host` tracks the runs of one host; `connection` watches its daemon; `container_spec`
turns an order into a container's description, or refuses it; `engine` speaks Docker's API.
"""

from hodei.backends.docker.backend import DockerBackend, make
from hodei.backends.docker.settings import Settings

__all__ = ["DockerBackend", "Settings", "make"]
