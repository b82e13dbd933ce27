"""Docker hosts, one or many, as one backend: every run is a container, every host a node.

`backend` sends orders to hosts and gathers what they say; `host` remembers the runs of one host and hears its events;
`conversation` keeps in touch with the daemon; `order` and `wishes` turn an order into a container's description, or refuse
it; `engine` is the only file that knows the client library.
"""

from hodei.backends.docker.backend import DockerBackend, make
from hodei.backends.docker.settings import Settings

__all__ = ["DockerBackend", "Settings", "make"]
