"""THE CLIENT: the public Python interface to a Hodei server, and the one that the command line uses.

    from hodei import Client
    job = Client().submit(command=["python", "train.py"], cpu=2, memory="4Gi").wait()

Standard library and msgspec only; it never imports the server. Requests are in `transport`, the calls in `api`,
the reading of output that goes on in `logs`.
"""

from __future__ import annotations

from hodei.client.api import Client
from hodei.client.errors import Denied, ServerUnreachable, WaitTimedOut
from hodei.client.job_refs import ArrayId, JobHandle

__all__ = ["ArrayId", "Client", "Denied", "JobHandle", "ServerUnreachable", "WaitTimedOut"]
