"""Idle agents that dial out: what they cost the server. `python -m benchmarks agents`.

The agents are scripted: each keeps one hanging request, and answers `hello`, `known` and pings as the real one does. They
run in a process of their own, so that only the server is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import msgspec

from hodei import __version__
from hodei.agent.channel import Batch, Channel
from hodei.agent.credentials import CREDENTIAL_PREFIX, digest_of, new_secret
from hodei.agent.https import HttpConnection, Unreachable, server_address
from hodei.backends.remote.registry import JoinedNode, Stored

ABOUT = "Idle agents that dial out: the server's CPU and memory."
OPTIONS = (
    click.option("--agents", type=click.IntRange(1), default=500, show_default=True, help="Number of agents."),
    click.option("--seconds", type=float, default=60.0, show_default=True, help="How long to measure."),
)
FACTS = {
    "hostname": "h", "kernel": "6", "os": "linux", "arch": "x86_64", "cpu_milli": 4000, "memory_bytes": 8 << 30,
    "host_memory_bytes": 8 << 30, "storage_bytes": 1 << 34, "gpus": 0, "gpu_type": "", "sockets": [[0, 1, 2, 3]],
}  # fmt: skip
CONFIG = """
[server.limits]
connections = 8192
connections_per_address = 0
requests_per_token = 0
[backends.local]
kind = "local"
enabled = false
[backends.lab]
kind = "hosts"
"""


async def agent(url: str, secret: str, ready: asyncio.Semaphore) -> None:
    http, channel = HttpConnection(server_address(url), "bench"), Channel()
    session = secrets.token_hex(16)
    hello = {
        "protocol": 1, "version": __version__, "instance": digest_of(secret)[:16], "place": "bench", "facts": FACTS,
    }  # fmt: skip
    fields: dict[str, Any] = {"session": session, "hello": hello, "hold_ms": 0}
    known = False
    while True:
        try:
            answer = await http.post("/api/v1/agent/exchange", fields | channel.batch().as_fields(), secret, 70)
        except Unreachable:
            await asyncio.sleep(0.2)
            continue
        if answer.status != 200:
            raise SystemExit(f"the server refuses: {answer.message}")
        body = answer.body
        for line in channel.receive(Batch(body["ack"], body["first"], body["messages"])):
            request = json.loads(line)
            ok: dict[str, Any] = {"runs": [], "more": False} if request["op"] == "known" else {}
            channel.send(json.dumps({"id": request["id"], "ok": ok}))
            if request["op"] == "known" and not known:
                known = True
                ready.release()
        fields = {"session": session, "hold_ms": 0 if channel.pending else 50_000}


async def agents(url: str, path: Path) -> None:
    ready = asyncio.Semaphore(0)
    found = json.loads(path.read_text())
    tasks = [asyncio.create_task(agent(url, secret, ready)) for secret in found]
    for _ in found:
        await ready.acquire()
    print("ready", flush=True)
    await asyncio.gather(*tasks)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(given: SimpleNamespace) -> dict[str, Any]:
    return measure_idle(given.agents, given.seconds)


def measure_idle(count: int, seconds: float) -> dict[str, Any]:
    """Of a server with so many idle agents, compared with the same server before they connect."""
    from hodei.model.effects import SaveValue
    from hodei.runtime.agent_records import NOTE
    from hodei.wiring import make_store

    with tempfile.TemporaryDirectory(prefix="hodei-agents-") as place:
        home = Path(place) / "home"
        home.mkdir(mode=0o700)
        (home / "config.toml").write_text(CONFIG)
        found = [new_secret(CREDENTIAL_PREFIX) for _ in range(count)]
        names = [f"n{number}" for number in range(count)]
        now = time.time_ns() // 1_000_000
        nodes = {
            name: JoinedNode(name, "lab", digest_of(secret)[:16], digest_of(secret), now, now)
            for name, secret in zip(names, found, strict=True)
        }
        store = make_store("", home)
        store.open()
        store.commit([SaveValue(NOTE, msgspec.json.encode(Stored({}, nodes)).decode())])
        store.close()
        (Path(place) / "secrets").write_text(json.dumps(found))
        server = subprocess.Popen(
            [sys.executable, "-m", "hodei.server", f"--home={home}", "--port=0"], stdout=subprocess.PIPE, text=True
        )
        clients = None
        try:
            assert server.stdout is not None
            line = next(line for line in server.stdout if " at http" in line)
            url = line.split(" at ")[1].split()[0]
            time.sleep(2)
            empty = rss(server.pid)
            began = time.monotonic()
            clients = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.agents", "--url", url, "--secrets", f"{place}/secrets"],
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert clients.stdout is not None
            assert clients.stdout.readline().strip() == "ready"
            connected_s = time.monotonic() - began
            time.sleep(5)
            before, at = cpu_s(server.pid), time.monotonic()
            time.sleep(seconds)
            used, lasted = cpu_s(server.pid) - before, time.monotonic() - at
            return {
                "agents": count,
                "connected_s": round(connected_s, 2),
                "cpu_percent_of_a_core": round(100 * used / lasted, 2),
                "memory_kib_per_agent": round((rss(server.pid) - empty) / 1024 / count, 1),
            }
        finally:
            for process in (clients, server):
                if process is not None:
                    process.terminate()
                    process.wait(60)
                    if process.stdout is not None:
                        process.stdout.close()


def main() -> None:
    """The process of the scripted agents."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url")
    parser.add_argument("--secrets", type=Path)
    given = parser.parse_args()
    asyncio.run(agents(given.url, given.secrets))


if __name__ == "__main__":
    main()
