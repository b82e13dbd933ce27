"""The PBS backend with the stand-in, whose docstring lists what it does not prove."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from agent_host import ReconnectingRecorder, an_order, unique_installation
from builders import a_job_spec
from hodei.backends.base import BackendContext
from hodei.backends.hpc import pbs as pbs_backend
from hodei.model.effects import Start
from hodei.model.errors import BackendRefused
from hodei.runtime.clock import SystemClock
from hodei.store.memory import MemoryStore
from hpc_backends import PbsStandIn
from unit.runtime.harness import a_service, until

pytestmark = pytest.mark.real


@contextlib.asynccontextmanager
async def open_backend(home: Path, **fields: Any) -> AsyncIterator[tuple[ReconnectingRecorder, PbsStandIn]]:
    system = PbsStandIn(home / "pbs")
    if queues := fields.pop("queues_json", None):
        (system.home / "queues.json").write_text(json.dumps(queues))
    settings = pbs_backend.Settings(
        output=str(home / "output"), commands=str(system.home), poll="100ms", **{"queues": ("workq",), **fields}
    )
    backend = pbs_backend.make(
        "hpc", settings, BackendContext(unique_installation(), 1, home / "backends", SystemClock())
    )
    await backend.open()
    try:
        yield ReconnectingRecorder(backend, 60), system
    finally:
        await backend.close()
        await system.clear()


def on(node: str, order: Start) -> Start:
    return structs.replace(order, run=structs.replace(order.run, node=node, backend="hpc"))


def test_a_run_has_its_full_grace_period_and_its_own_exit_code(tmp_path):
    """TERM reaches all processes of the job at once. The handler takes longer than the 0.2 s after which qdel of the stand-in kills."""

    async def scenario() -> None:
        async with open_backend(tmp_path) as (recorder, _):
            script = 'trap "sleep 1; echo saved; exit 9" TERM; echo ready; while :; do sleep 0.05; done'
            await recorder.backend.start([on("hpc-workq", an_order(1, "/bin/bash", "-c", script))])
            await recorder.log_has("1.0.1", b"ready")
            await recorder.stop("1.0.1", grace_ms=30_000)
            end = await recorder.end_of("1.0.1")
            assert (end.state, end.exit_code) == ("stopped", 9)
            assert await recorder.log("1.0.1") == b"ready\nsaved\n"

    asyncio.run(scenario())


def test_a_run_ended_by_a_signal_shows_no_value_of_its_environment(tmp_path):
    async def scenario() -> None:
        async with open_backend(tmp_path) as (recorder, _):
            for number, sign in enumerate(("TERM", "KILL", "SEGV"), 1):
                order = an_order(number, "/bin/sh", "-c", f"kill -{sign} $$", env={"DB_PASSWORD": "hidden"})
                (end,) = await recorder.run(on("hpc-workq", order))
                assert end.reason_code == "killed"
                assert await recorder.log(f"{number}.0.1", "stderr") == b""

    asyncio.run(scenario())


def test_a_run_that_exceeds_its_memory_in_pbs_is_out_of_memory(tmp_path):
    async def scenario() -> None:
        async with open_backend(tmp_path) as (recorder, system):
            (system.home / "enforce").touch()
            use_memory = 'x=$(head -c 200000000 /dev/zero | tr "\\0" x); sleep 60'
            (end,) = await recorder.run(on("hpc-workq", an_order(1, "/bin/bash", "-c", use_memory, memory="64Mi")))
            assert (end.state, end.reason_code) == ("failed", "oom"), end
            assert "memory limit" in end.reason

    asyncio.run(scenario())


QUEUES = {
    "workq": {"from_route_only": "True", "resources_max": {"walltime": "01:00:00"}},
    "short": {"resources_max": {"walltime": "00:10:00"}},
    "route": {"queue_type": "Route", "route_destinations": "workq,short"},
    "remote": {"queue_type": "Route", "route_destinations": "queue@other"},
}


def test_a_routing_queue_is_usable_and_its_destination_is_not_with_a_reason(tmp_path):
    async def scenario() -> None:
        async with open_backend(tmp_path, queues_json=QUEUES, queues=()) as (recorder, _):
            nodes = {node.name: node for node in await recorder.backend.nodes()}
            assert {name: node.ready for name, node in nodes.items()} == {
                "hpc-workq": False, "hpc-short": True, "hpc-route": True, "hpc-remote": False,
            }  # fmt: skip
            assert nodes["hpc-workq"].not_ready_reason == "it takes jobs only from routing queues; submit to route"
            assert "routing queue to queue@other" in nodes["hpc-remote"].not_ready_reason
            assert nodes["hpc-route"].capacity == nodes["hpc-short"].capacity
            (end,) = await recorder.run(on("hpc-route", an_order(1, "/bin/sh", "-c", "echo $PBS_QUEUE")))
            assert end.state == "succeeded"
            assert await recorder.log("1.0.1") == b"workq\n"
            answer = await recorder.backend.start([on("hpc-workq", an_order(2, "/bin/true"))])
            assert isinstance(answer["2.0.1"], BackendRefused)
            assert "takes jobs only from routing queues" in answer["2.0.1"].message

    asyncio.run(scenario())


def test_in_placed_mode_an_open_queue_is_chosen(tmp_path):
    async def scenario() -> None:
        async with open_backend(tmp_path, queues_json=QUEUES, queues=("workq", "route"), mode="placed") as (
            recorder,
            _,
        ):
            assert all(node.ready for node in await recorder.backend.nodes())
            (end,) = await recorder.run(on("hpc-vm[1]", an_order(1, "/bin/true")))
            assert end.state == "succeeded"
        async with open_backend(tmp_path / "2", queues_json=QUEUES, queues=("workq",), mode="placed") as (recorder, _):
            reasons = {node.not_ready_reason for node in await recorder.backend.nodes() if not node.ready}
            assert reasons == {"workq: it takes jobs only from routing queues; submit to route"}

    asyncio.run(scenario())


def test_starts_during_a_long_outage_of_the_server_count_as_no_losses(tmp_path):
    """If these starts counted as losses, the job would fail after four of them."""

    async def scenario() -> None:
        system = PbsStandIn(tmp_path / "pbs")
        context = BackendContext(unique_installation(), 1, tmp_path / "backends", SystemClock())
        service = a_service(
            MemoryStore(), system.backend(context, tmp_path / "output", "delegate"), clock=SystemClock()
        )  # type: ignore[arg-type]
        await service.start()
        try:
            assert await service.until_ready(30)
            (system.home / "down").touch()
            await service.submit([a_job_spec(command=("/bin/true",), memory="16Mi")])
            await until(lambda: service.store.job(1).attempt > 5, 60)
            (system.home / "down").unlink()
            await until(lambda: service.store.job(1).finished_ms, 60)
            job = service.store.job(1)
            assert (job.state, job.losses, job.failures) == ("succeeded", 0, 0), job.reason
        finally:
            await service.stop()
            await system.clear()

    asyncio.run(scenario())
