"""The log of a server in the background: bounded in size, with a few older files beside it.

Everything that the process says ends up in it, also what does not come through `logging`: its standard output and error are
moved to the new file whenever the old one is set aside.
"""

from __future__ import annotations

import logging.handlers
import os
from pathlib import Path

MAX_BYTES = 16 << 20
OLDER_FILES = 3


class LogFile(logging.handlers.RotatingFileHandler):
    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES, older_files: int = OLDER_FILES) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=older_files, encoding="utf-8")
        self._take_over()

    def doRollover(self) -> None:
        super().doRollover()
        self._take_over()

    def _take_over(self) -> None:
        assert self.stream is not None
        for fd in (1, 2):
            os.dup2(self.stream.fileno(), fd)

    def _open(self):  # type: ignore[no-untyped-def]
        """The file is never readable by others, not even for a moment."""
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=_closed_to_others)


def _closed_to_others(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
