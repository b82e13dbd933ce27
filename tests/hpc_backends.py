"""Batch system backends: Slurm in both modes and over both transports, and PBS with its stand-in."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from agent_host import unique_installation
from hodei.backends.base import BackendContext
from hodei.backends.hpc import pbs as pbs_backend
from hodei.backends.hpc import slurm as slurm_backend
from hodei.backends.hpc.backend import HpcBackend
from hodei.runtime.clock import SystemClock
from slurm_cluster import SlurmCluster


def slurm_settings(
    cluster: SlurmCluster, output: Path, mode: str, transport: str, **fields: Any
) -> slurm_backend.Settings:
    return slurm_backend.Settings(
        output=str(output),
        mode=mode,  # type: ignore[arg-type]
        transport=transport,  # type: ignore[arg-type]
        conf=str(cluster.conf),
        **{"partitions": ("main",), "poll": "100ms", "rest": f"unix:{cluster.rest_socket}", **fields},
    )


def a_slurm(
    cluster: SlurmCluster, home: Path, mode: str, transport: str, *, installation: str = "", **fields: Any
) -> HpcBackend:
    context = BackendContext(installation or unique_installation(), 1, home / "backends", SystemClock())
    return slurm_backend.make("hpc", slurm_settings(cluster, home / "output", mode, transport, **fields), context)


class PbsStandIn:
    """The commands of `stand_ins/pbs`, installed into `home`, which also holds their jobs."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        text = (Path(__file__).parent / "stand_ins/pbs/stand_in.py").read_text().split("\n", 1)[1]
        for name in ("qsub", "qstat", "qdel", "qsig", "pbsnodes"):
            # This interpreter without its packages: the commands are called often and must start fast.
            (home / name).write_text(f"#!{sys.executable} -IS\n{text}")
            (home / name).chmod(0o755)

    def backend(self, context: BackendContext, output: Path, mode: str) -> HpcBackend:
        settings = pbs_backend.Settings(
            output=str(output),
            mode=mode,
            queues=("workq",),
            poll="100ms",
            commands=str(self.home),  # type: ignore[arg-type]
        )
        return pbs_backend.make("hpc", settings, context)

    async def clear(self) -> None:
        for path in (self.home / "jobs").glob("*.json"):
            process = await asyncio.create_subprocess_exec(
                self.home / "qdel", path.stem, stderr=asyncio.subprocess.DEVNULL
            )
            await process.wait()
