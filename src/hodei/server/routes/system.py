"""The server itself: what it is, how it is, what it understands."""

from __future__ import annotations

import msgspec

from hodei import __version__
from hodei.api.views import CheckList, Info
from hodei.jobfile.json_schema import job_schema
from hodei.jobfile.render import iso
from hodei.model.config import SchedulingConfig
from hodei.server.route import API, PUBLIC, READ, Call, Policy, Reply, Route

_TEXT = "text/plain; charset=utf-8"


async def info(call: Call) -> Info:
    service, scope = call.service, call.scope
    host = next(value for name, value in scope["headers"] if name == b"host").decode("latin-1")
    return Info(
        version=__version__,
        api="v1",
        installation=service.installation,
        address=f"{scope.get('scheme', 'http')}://{host}",
        epoch=service.epoch,
        started_at=iso(service.started_ms),
        ready=service.ready,
        profiles=list(service.profiles),
        backends=list(service.backends),
        jobs=await service.read(service.store.counts),
    )


async def scheduling(call: Call) -> SchedulingConfig:
    return call.service.scheduling


async def checks(call: Call) -> CheckList:
    return CheckList(await call.service.checks())


async def schema_job(call: Call) -> Reply:
    return Reply(msgspec.json.encode(job_schema()), media_type="application/schema+json")


async def openapi_document(call: Call) -> Reply:
    return Reply(call.shared.openapi)


async def livez(call: Call) -> Reply:
    return Reply(b"ok\n", media_type=_TEXT)


async def readyz(call: Call) -> Reply:
    await call.service.check_ready()
    # Jobs are taken all the same, and wait. What is wrong with it is told to those who may ask: hodei doctor.
    unwell = [name for name, error in call.service.backend_errors().items() if error]
    return Reply("".join(["ok\n", *(f"backend {name} is unhealthy\n" for name in unwell)]).encode(), media_type=_TEXT)


async def metrics(call: Call) -> Reply:
    return Reply(call.service.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def root(call: Call) -> Reply:
    return Reply(f"Hodei {__version__}, a job scheduler. The API is at {API}/openapi.json\n".encode(), media_type=_TEXT)


def metrics_route(policy: Policy) -> Route:
    return Route("GET", "/metrics", policy, "Prometheus metrics", metrics, response=bytes, media_type="text/plain")


ROUTES = (
    Route("GET", f"{API}/info", READ, "What this server is", info, response=Info),
    Route("GET", f"{API}/scheduling", READ, "What its decisions depend on", scheduling, response=SchedulingConfig),
    Route("GET", f"{API}/checks", READ, "What `hodei doctor` finds", checks, response=CheckList),
    Route("GET", f"{API}/schema/job", PUBLIC, "The JSON Schema of a job document", schema_job,
          media_type="application/schema+json"),
    Route("GET", f"{API}/openapi.json", PUBLIC, "This document", openapi_document),
    Route("GET", "/livez", PUBLIC, "Whether the process answers at all", livez, response=bytes,
          media_type="text/plain", lane="free"),
    Route("GET", "/readyz", PUBLIC, "Whether jobs are taken; 503 with the reason while not", readyz, response=bytes,
          media_type="text/plain", lane="free"),
    Route("GET", "/", PUBLIC, "One line that says what this is", root, response=bytes, media_type="text/plain"),
)  # fmt: skip
