"""Agents that dial out over TLS with a private CA; a proxy; and the rotation of their credentials."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from agent_host import an_order, until
from hodei.testing.backend import RunRecorder
from joined_agents import Agents, joined_agents

pytestmark = pytest.mark.real


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    files = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    words += ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]]
    subprocess.run(words, check=True, capture_output=True)
    return files


def joined(agents: Agents, node: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((agents.agent_home(node) / "joined.json").read_text())
    return found


def test_an_agent_trusts_the_given_ca_only_and_passes_a_proxy(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    connects: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        connects.append(head.partition(b"\r\n")[0])
        port = int(head.split()[1].rpartition(b":")[2])
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            try:
                while data := await source.read(1 << 16):
                    target.write(data)
                    await target.drain()
            except OSError:
                pass
            finally:
                target.close()

        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer))

    async def test() -> None:
        async with joined_agents(tmp_path / "agents", certificate=certificate[0], key=certificate[1]) as agents:
            backend = agents.backend()
            await backend.open()
            server = await asyncio.start_server(proxy, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            token, _ = await agents.registry.create_token("lab", node="near", ttl_ms=60_000)
            agents.start("near", token=token, env={"https_proxy": f"http://127.0.0.1:{port}", "no_proxy": ""})
            await until(lambda: "near" in agents.hub.sessions)
            await backend.until_ready()
            order = an_order(1, "/bin/sh", "-c", "exit 4")
            recorder = RunRecorder(backend)
            order = structs.replace(order, run=structs.replace(order.run, node="near", backend="lab"))
            (end,) = await recorder.run(order)
            assert end.exit_code == 4
            assert connects[0] == f"CONNECT 127.0.0.1:{agents.port} HTTP/1.1".encode()
            agents.certificate, kept = None, agents.certificate
            other, _ = await agents.registry.create_token("lab", node="far", ttl_ms=60_000)
            agents.start("far", token=other)  # without the CA
            await until(lambda: "certificate" in agents.log_of("far"))
            agents.certificate = kept
            assert "far" not in agents.hub.sessions
            await backend.close()
            await agents.close()
            server.close()
            await server.wait_closed()

    asyncio.run(test())


def test_a_credential_is_rotated_and_the_old_one_is_void_after_the_first_use_of_the_new(tmp_path: Path) -> None:
    async def test() -> None:
        async with joined_agents(tmp_path / "agents") as agents:
            backend = agents.backend(away_ms=2000)
            await backend.open()
            await agents.join("edge-1")
            old = joined(agents, "edge-1")["credential"]
            agents.hub._rotate_after_ms = 0
            await until(lambda: joined(agents, "edge-1")["credential"] != old, "it has a new credential")
            agents.hub._rotate_after_ms = 1 << 60
            node = agents.registry.nodes["edge-1"]
            await until(lambda: not agents.registry.nodes["edge-1"].next_digest, "the new one was used")
            assert agents.registry.nodes["edge-1"].digest != node.digest or not node.next_digest
            with pytest.raises(Exception, match="not known"):
                agents.registry.find_node(old)
            agents.kill("edge-1")
            agents.start("edge-1")
            await backend.until_ready()
            await backend.close()

    asyncio.run(test())
