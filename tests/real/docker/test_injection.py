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
    act = f"touch {canary}"
    words = [
        f"$({act})", f"`{act}`", f"; {act} ;", f"&& {act}", f"| {act}", f"\n{act}\n", f"'; {act}; '", f'"; {act}; "',
        f"${{IFS}}{act}", f"$({act}", f">{canary}", f"<({act})", "--privileged", "-v", "/:/host", "--", "-", "*", "~",
        "%s%n", "\\", "é\u202e\U0001f680", "\t", "a=b",
    ]  # fmt: skip
    return words[:RUNS]


def test_no_shell_reads_user_input(dockerd: DockerDaemons, tmp_path: Path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    canary = f"{shared}/canary"
    words = hostile(canary)

    async def story() -> None:
        backend = a_docker(tmp_path / "home", dockerd(), allow=Allow(mounts=(f"{shared}:rw",)))
        await backend.open()
        desk = ReconnectingRecorder(backend, 120)
        try:
            orders = []
            for job, word in enumerate(words, 1):
                order = an_order(
                    job, "/bin/sh", "-c", 'printf "%s\\n" "$1" "$WORD" "$PWD"', "sh", word,
                    env={"WORD": word, f"x {word.replace('=', '')}": word},
                    labels={f"label {word}": word},
                    workdir="/w" + word.replace("/", "_").strip(),
                    annotations={"docker.hodei.io/mounts": f"{shared}:{shared}:rw"},
                )  # fmt: skip
                orders.append(structs.replace(order, spec=structs.replace(order.spec, name=word)))
            for end in await desk.run(*orders):
                assert end.state == "succeeded", end
            for order, word in zip(orders, words, strict=True):
                said = (await desk.log(order.run.id)).decode()
                assert said == f"{word}\n{word}\n{order.task.workdir}\n"
            for container in await asyncio.to_thread(dockerd().containers):
                found = await asyncio.to_thread(dockerd().request, "GET", f"/containers/{container['Id']}/json")
                assert found["HostConfig"]["Privileged"] is False
                assert [mount["Source"] for mount in found["Mounts"]] == [str(shared)]
        finally:
            await backend.close()
            dockerd().clear()

    asyncio.run(story())
    assert list(shared.iterdir()) == []
