"""Kind `bare_metal`: machines that are switched on and off through their BMCs; an agent on each of them runs the jobs.

`settings` are the keys of its table; `bmc` speaks Redfish and IPMI, in threads; `provider` keeps the state of all machines;
`backend` makes nodes of them. See docs/how-to/bare-metal.md.
"""

from hodei.backends.bare_metal.backend import BareMetalBackend, make
from hodei.backends.bare_metal.settings import Settings

__all__ = ["BareMetalBackend", "Settings", "make"]
