"""THE CLIENT: the public Python interface to a Hodei server, also used by the command line.

    from hodei import Client
    job = Client().submit(command=["python", "train.py"], cpu=2, memory="4Gi").wait()

Standard library and msgspec only; it never imports the server. `transport` sends requests, `resources` and `api` have
the calls, `logs` follows output.
"""

from __future__ import annotations

from hodei.client.api import Client
from hodei.client.job_refs import ArrayId, JobHandle
from hodei.client.transport import Denied, ServerUnreachable, WaitTimedOut

__all__ = ["ArrayId", "Client", "Denied", "JobHandle", "ServerUnreachable", "WaitTimedOut"]
