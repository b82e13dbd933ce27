"""How readers affect submissions: a real server with many pending jobs, several viewers that query without a pause, and one
client that submits one job at a time.

The jobs are for a node that does not exist. Then a large array is submitted and cancelled, and the server is restarted. The
results are the longest pauses of the server's event loop, the latency of submissions, and the memory of a pending job
before and after the restart.
"""

from __future__ import annotations

import multiprocessing
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from hodei.api.views import WhatIfRequest
from hodei.client import Client
from hodei.model.errors import HodeiError

KINDS = ("none", "why", "priority", "whatif", "jobs", "info")
_WATCHED = Path(__file__).with_name("watched.py")
_BATCH = 2000
_ELSEWHERE = {"cpu": "1m", "memory": "1Mi", "node_selector": {"bench": "elsewhere"}, "estimate": "1m"}
_WAITS = {"name": "waits", "command": ["/bin/true"], **_ELSEWHERE}


ABOUT = "Pauses of a server with many readers."
OPTIONS = (
    click.option("--waiting", type=int, default=100000, help="Pending jobs [default: 100000]."),
    click.option("--viewers", type=int, default=8, help="Viewers of each kind, one kind after another [default: 8]."),
    click.option("--seconds", type=float, default=10.0, help="Duration per kind [default: 10]."),
    click.option(
        "--kinds",
        multiple=True,
        type=click.Choice(KINDS),
        default=KINDS,
        metavar="KIND",
        help=f"Kinds of viewers; may be repeated: {', '.join(KINDS)} [default: all].",
    ),
    click.option("--array", type=int, default=100000, help="Elements of the array, 0 for none [default: 100000]."),
    click.option("--restart", is_flag=True, help="Restart the server with all the jobs."),
    click.option("--names", is_flag=True, help="Give every pending job its own name."),
    click.option("--config", default="", help="Text of the configuration file."),
)


def measure(given: SimpleNamespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hodei-bench-") as name:
        home = Path(name)
        (home / "config.toml").write_text(given.config)
        return _measure_in(given, home)


def _measure_in(given: SimpleNamespace, home: Path) -> dict[str, Any]:
    result: dict[str, Any] = {"waiting": given.waiting}
    with _server(home) as (pid, client, _):
        empty_mb = _rss_mb(pid)
        ids = _fill(client, given.waiting, names=given.names)
        time.sleep(2)
        result["rss_mb"] = round(_rss_mb(pid))
        result["bytes_per_waiting_job"] = round((_rss_mb(pid) - empty_mb) * 2**20 / max(given.waiting, 1))
        for kind in given.kinds:
            result |= _with_viewers(home, kind, ids, given)
        if given.array:
            result |= _array(home, client, given.array)
        result["rss_mb_at_the_end"] = round(_rss_mb(pid))
    if given.restart:
        with _server(home) as (pid, _, seconds):
            time.sleep(2)
            result["restart_s_to_ready"] = round(seconds, 1)
            result["restart_rss_mb"] = round(_rss_mb(pid))
            result["restart_bytes_per_waiting_job"] = round((_rss_mb(pid) - empty_mb) * 2**20 / max(given.waiting, 1))
    return result


@contextmanager
def _server(home: Path) -> Iterator[tuple[int, Client, float]]:
    command = [sys.executable, "-P", str(_WATCHED), "--home", str(home), "--port", "0", "--instant"]
    began = time.monotonic()
    with (home / "server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert server.stdout is not None
        first = server.stdout.readline()
        if not re.search(r" is up at http", first):
            raise RuntimeError(f"the server did not come up: {first!r}")
        yield server.pid, Client(home=home, timeout_s=300), time.monotonic() - began
    finally:
        server.terminate()
        server.wait(120)


def _fill(client: Client, jobs: int, *, names: bool) -> list[int]:
    ids: list[int] = []
    for first in range(0, jobs, _BATCH):
        size = min(_BATCH, jobs - first)
        documents = [{**_WAITS, "name": f"waits-{first + i}"} if names else _WAITS for i in range(size)]
        ids += client.submit_all(documents)
    return ids


def _with_viewers(home: Path, kind: str, ids: list[int], given: SimpleNamespace) -> dict[str, Any]:
    stop = multiprocessing.Event()
    answers = multiprocessing.Value("q", 0)
    viewers = [
        multiprocessing.Process(target=_query, args=(home, kind, ids, number, stop, answers), daemon=True)
        for number in range(given.viewers if kind != "none" else 0)
    ]
    for viewer in viewers:
        viewer.start()
    time.sleep(0.5)
    began = time.monotonic()
    took, failed, client = list[float](), 0, Client(home=home, timeout_s=300)
    while time.monotonic() - began < given.seconds:
        at = time.monotonic()
        try:
            client.submit({**_WAITS, "name": "extra"})
        except HodeiError:
            failed += 1
        took.append(time.monotonic() - at)
        time.sleep(0.02)
    ended = time.monotonic()
    stop.set()
    for viewer in viewers:
        viewer.join(60)
    return {f"{kind}: {name}": value for name, value in {
        "answers/s": round(answers.value / (ended - began), 1),
        **_pauses(home, began, ended),
        "submits": len(took),
        "submits without an answer": failed,
        **_quantiles("submit", took),
    }.items()}  # fmt: skip


def _query(home: Path, kind: str, ids: list[int], number: int, stop: Any, answers: Any) -> None:
    client, draw = Client(home=home, timeout_s=300), random.Random(number)
    queries: dict[str, Callable[[], object]] = {
        "why": lambda: client.why(draw.choice(ids)),
        "priority": lambda: client.priority(draw.choice(ids)),
        "whatif": lambda: client.what_if(WhatIfRequest(add_nodes=1 + number)),
        "jobs": lambda: list(client.jobs(limit=1000)),
        "info": client.info,
    }
    while not stop.is_set():
        try:
            queries[kind]()
        except HodeiError:
            time.sleep(0.2)  # too busy: retry later
        else:
            with answers.get_lock():
                answers.value += 1


def _array(home: Path, client: Client, elements: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for what in ("submit", "cancel"):
        latencies, stop = list[float](), threading.Event()
        poller = threading.Thread(target=_poll_until, args=(home, latencies, stop))
        poller.start()
        began = time.monotonic()
        if what == "submit":
            (first,) = client.submit_all([{**_WAITS, "name": "array", "array": {"count": elements}}])
        else:
            client._post(f"/arrays/{first}/cancel", dict)
        answered = time.monotonic()
        time.sleep(1)
        stop.set()
        poller.join()
        out[f"array {what}: s"] = round(answered - began, 2)
        out |= {f"array {what}: {name}": value for name, value in _pauses(home, began, time.monotonic()).items()}
        out |= {f"array {what}: {name}": value for name, value in _quantiles("other request", latencies).items()}
    return out


def _poll_until(home: Path, latencies: list[float], stop: threading.Event) -> None:
    client = Client(home=home, timeout_s=300)
    while not stop.is_set():
        at = time.monotonic()
        with suppress(HodeiError):
            client.ready()
        latencies.append(time.monotonic() - at)
        time.sleep(0.005)


def _pauses(home: Path, began: float, ended: float) -> dict[str, int]:
    """The longest pause in that time: by the clock, and by CPU time of the loop's thread."""
    lines = [
        list(map(float, line.split())) for line in (home / "pauses").read_text().splitlines() if line.count(" ") == 2
    ]
    found = [(late, cpu) for at, late, cpu in lines if began <= at <= ended + 0.1]
    return {
        "longest pause, ms": round(1000 * max((late for late, _ in found), default=0)),
        "longest pause, ms of CPU": round(1000 * max((cpu for _, cpu in found), default=0)),
    }


def _quantiles(what: str, took: list[float]) -> dict[str, int]:
    took = sorted(took) or [0.0]
    return {
        f"{what} p50, ms": round(1000 * took[len(took) // 2]),
        f"{what} p99, ms": round(1000 * took[min(len(took) - 1, len(took) * 99 // 100)]),
    }


def _rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


if __name__ == "__main__":  # measures another commit with this file
    command = click.command()(lambda **options: print(measure(SimpleNamespace(**options))))
    for decorate in OPTIONS:
        command = decorate(command)
    command()
