"""`/healthz /livez /readyz /metrics`: plain HTTP for probes and Prometheus. It says nothing about pods by name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route


class Health:
    """`ready`: it may be counted on. `troubles`: why it should be started again; nothing while its loop goes round and all
    its watches do. `ages`: how long ago each watch was last heard, for `/livez?verbose`."""

    def __init__(self) -> None:
        self.ready = False
        self.troubles: Callable[[], list[str]] = list
        self.ages: Callable[[], Mapping[str, float]] = dict
        self.metrics: Callable[[], bytes] = lambda: b""

    def app(self) -> Starlette:
        async def live(request: Request) -> Response:
            troubles = self.troubles()
            lines = [f"not ok: {trouble}" for trouble in troubles] or ["ok"]
            if "verbose" in request.query_params:
                lines = [*(f"{path}: heard {age:.0f} s ago" for path, age in sorted(self.ages().items())), *lines]
            return PlainTextResponse("\n".join(lines), 500 if troubles else 200)

        async def ready(request: Request) -> Response:
            return PlainTextResponse("ok" if self.ready else "not yet", 200 if self.ready else 503)

        async def metrics(request: Request) -> Response:
            return Response(self.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

        return Starlette(
            routes=[
                Route("/healthz", live),
                Route("/livez", live),
                Route("/readyz", ready),
                Route("/metrics", metrics),
            ]
        )


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the scheduler hears them itself


@contextlib.asynccontextmanager
async def serving(health: Health, host: str, port: int) -> AsyncIterator[asyncio.Task[None]]:
    """Answers while inside; the task that does."""
    config = uvicorn.Config(health.app(), host=host, port=port, log_level="warning", access_log=False, lifespan="off")
    server = _Server(config)
    task = asyncio.create_task(server.serve())
    try:
        while not server.started and not task.done():  # noqa: ASYNC110 (uvicorn has no event to wait for)
            await asyncio.sleep(0.01)
        if task.done():
            await task
        yield task
    finally:
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError, SystemExit):
            await task
