"""Ctrl-C while `hodei run` follows a job: the job is cancelled, and what it still says is shown until it has ended.

The reading is not broken off: the cancel is sent from the signal's handler, on a connection of its own, and the loop that
reads goes on and ends as it always does, when the job has ended. A second Ctrl-C, or a job that outlives its grace period,
ends it at once.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import TYPE_CHECKING

from hodei.model.errors import HodeiError

if TYPE_CHECKING:
    from hodei.client import Client

# How long the end of a cancelled job is waited for, beyond its own grace period.
AFTER_GRACE_S = 10.0
_USUAL_GRACE = "10s"


class CancelOnInterrupt:
    """`with CancelOnInterrupt(server, id):` around the reading. `asked`: whether Ctrl-C has come. `failed`: why the cancel
    could not be sent; `too_long`: the job had not ended in time. Both leave by KeyboardInterrupt, as a second Ctrl-C does.
    `server`: a client that nothing else uses, because the handler runs in the middle of other requests."""

    def __init__(self, server: Client, id: int) -> None:
        self._server, self._id = server, id
        self.asked = self.too_long = False
        self.failed: HodeiError | None = None
        self._installed = False

    def __enter__(self) -> CancelOnInterrupt:
        # Where SIGINT is ignored (nohup, a script's background job) it stays so.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupted)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.asked:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _interrupted(self, _: int, frame: FrameType | None) -> None:
        from hodei.client import ArrayId

        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.asked = True
        what = "array" if isinstance(self._id, ArrayId) else "job"
        # Past Python's buffers: they may be in use by what was interrupted.
        os.write(2, f"cancelling {what} {self._id} (Ctrl-C again leaves it to its fate)\n".encode())
        try:
            self._server.cancel(self._id, "interrupted at the terminal")
            grace_s = self._grace_s()
        except HodeiError as error:
            # Raised as it is, the code that was interrupted would take it for an error of its own request.
            self.failed = error
            raise KeyboardInterrupt from None
        signal.signal(signal.SIGALRM, self._is_too_long)
        signal.setitimer(signal.ITIMER_REAL, grace_s + AFTER_GRACE_S)

    def _is_too_long(self, _: int, frame: FrameType | None) -> None:
        self.too_long = True
        raise KeyboardInterrupt

    def _grace_s(self) -> float:
        """Of an array every element has the same."""
        from hodei.model.quantity import parse_duration_ms

        spec = self._server.job(int(self._id)).spec
        inner = spec.get("spec")
        return parse_duration_ms((inner if isinstance(inner, dict) else spec).get("grace", _USUAL_GRACE)) / 1000
