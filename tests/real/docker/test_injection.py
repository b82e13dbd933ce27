"""Shell metacharacters in every field of a job, as real runs: no shell ever reads them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec import structs

from agent_host import ReconnectingRecorder
from docker_backends import a_docker
from docker_hosts import DockerDaemons
from hodei.backends.docker.settings import Allow
from real.docker.test_runs import an_order

pytestmark = [pytest.mark.real, pytest.mark.slow]
RUNS = 24


def hostile(canary: str) -> list[str]:
    command = f"touch {canary}"
    strings = [
        f"$({command})", f"`{command}`", f"; {command} ;", f"&& {command}", f"| {command}", f"\n{command}\n", f"'; {command}; '", f'"; {command}; "',
        f"${{IFS}}{command}", f"$({command}", f">{canary}", f"<({command})", "--privileged", "-v", "/:/host", "--", "-", "*", "~",
        "%s%n", "\\", "é\u202e\U0001f680", "\t", "a=b",
    ]  # fmt: skip
    return strings[:RUNS]


def test_no_shell_reads_user_input(dockerd: DockerDaemons, tmp_path: Path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    canary = f"{shared}/canary"
    strings = hostile(canary)

    async def scenario() -> None:
        backend = a_docker(tmp_path / "home", dockerd(), allow=Allow(mounts=(f"{shared}:rw",)))
        await backend.open()
        recorder = ReconnectingRecorder(backend, 120)
        try:
            orders = []
            for job, string in enumerate(strings, 1):
                order = an_order(
                    job, "/bin/sh", "-c", 'printf "%s\\n" "$1" "$TEXT" "$PWD"', "sh", string,
                    env={"TEXT": string, f"x {string.replace('=', '')}": string},
                    labels={f"label {string}": string},
                    workdir="/w" + string.replace("/", "_").strip(),
                    annotations={"docker.hodei.io/mounts": f"{shared}:{shared}:rw"},
                )  # fmt: skip
                orders.append(structs.replace(order, spec=structs.replace(order.spec, name=string)))
            for end in await recorder.run(*orders):
                assert end.state == "succeeded", end
            for order, string in zip(orders, strings, strict=True):
                output = (await recorder.log(order.run.id)).decode()
                assert output == f"{string}\n{string}\n{order.task.workdir}\n"
            for container in await asyncio.to_thread(dockerd().containers):
                found = await asyncio.to_thread(dockerd().request, "GET", f"/containers/{container['Id']}/json")
                assert found["HostConfig"]["Privileged"] is False
                assert [mount["Source"] for mount in found["Mounts"]] == [str(shared)]
        finally:
            await backend.close()
            dockerd().clear()

    asyncio.run(scenario())
    assert list(shared.iterdir()) == []
