"""Where the output of runs is: below a folder that the server and the nodes see under the same path."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from hodei.model.errors import BackendError, NotFound
from hodei.model.ids import RunId, job_of
from hodei.ports import Stream

JOBS_PER_FOLDER = 1000
SAVED, SCRIPT = ".saved", ".sh"
_ENDINGS: dict[Stream, str] = {"stdout": ".out", "stderr": ".err"}


class Files:
    """`root` is the installation's own folder, for its account alone. All methods block."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._made: set[Path] = set()

    def check(self) -> None:
        """BackendError if nothing can be written there."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self.root / ".probe"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise BackendError(
                f"the output folder {self.root} cannot be written: {error.strerror}",
                hint="set `output` to a folder that the server and all nodes share",
            ) from None

    def of(self, run: RunId) -> str:
        """What the paths of a run's files begin with; their folder is there."""
        folder = self.root / str(job_of(run) // JOBS_PER_FOLDER)
        if folder not in self._made:
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                raise BackendError(f"the folder {folder} cannot be made: {error.strerror}") from None
            self._made.add(folder)
        return str(folder / run)

    @staticmethod
    def stream(files: str, stream: Stream) -> str:
        return files + _ENDINGS[stream]

    def read(self, run: RunId, stream: Stream, offset: int, limit: int, known: bool) -> tuple[bytes, int]:
        try:
            path = self.root / str(job_of(run) // JOBS_PER_FOLDER) / run
            fd = os.open(self.stream(str(path), stream), os.O_RDONLY | os.O_NOFOLLOW)
        except (OSError, ValueError) as error:
            if known and isinstance(error, FileNotFoundError):
                return b"", offset
            raise NotFound(f"there is no output of run {run}", hint="it may be gone by its age") from None
        with os.fdopen(fd, "rb") as file:
            data = os.pread(file.fileno(), limit, offset)
        return data, offset + len(data)

    @staticmethod
    def changed_ms(path: str) -> int:
        """0 if it is not there."""
        try:
            return os.stat(path).st_mtime_ns // 1_000_000
        except OSError:
            return 0

    @staticmethod
    def drop(files: str) -> None:
        """What is of no use any more. The record stays until it is old: a system that crashes may start the job again."""
        for ending in (SAVED, SCRIPT):
            with contextlib.suppress(OSError):
                os.unlink(files + ending)

    def sweep(self, oldest_s: float, but: Collection[str]) -> int:
        """Away with the output of runs that nobody has written to since; how many files."""
        gone = 0
        for folder in self.root.glob("[0-9]*"):
            for path in folder.iterdir():
                with contextlib.suppress(OSError):
                    if str(path.with_suffix("")) not in but and path.stat().st_mtime < oldest_s:
                        path.unlink()
                        gone += 1
        return gone
