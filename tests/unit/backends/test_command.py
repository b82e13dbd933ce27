"""Kind `command`: what its programs get, and what becomes of what they print."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from agent_host import alive
from hodei.backends.base import BackendContext
from hodei.backends.command import MAX_OUTPUT, CommandProvider, Settings, make
from hodei.backends.remote.hub import AgentHub
from hodei.backends.remote.machines import Join
from hodei.backends.remote.registry import AgentRegistry
from hodei.model.capacity import NO_CAPACITY
from hodei.model.errors import IN_DOUBT, BackendError, InvalidInput
from hodei.model.node import Location
from hodei.runtime.clock import SystemClock

pytestmark = pytest.mark.real
TRUE = ("true",)


def sh(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script, "sh")


def provider(**commands: Any) -> CommandProvider:
    return CommandProvider("lab", Settings(**{"list": sh("echo '[]'"), "start": TRUE, "stop": TRUE, **commands}))


def listed(*machines: dict[str, Any]) -> tuple[str, ...]:
    return ("printf", "%s", json.dumps(machines))


def error_of(work: Any) -> BackendError:
    with pytest.raises(BackendError) as caught:
        asyncio.run(work)
    return caught.value


JOINS = {name: Join(name, "https://hodei.example", f"hode_secret_of_{name}") for name in ("m1", "m2")}


def test_machines_are_read_with_their_prices() -> None:
    one = {
        "name": "m1", "state": "starting", "group": "big", "cpu": 64, "memory": "512Gi", "gpu": 8, "gpu_type": "h100",
        "arch": "arm64", "region": "eu", "zone": "a", "rack": "r7", "startup": "90s", "price": 1.5, "spot": True,
        "losses_per_hour": 0.05, "progress": "it boots", "labels": {"a": "b"}, "resources": {"example.com/fpga": 2},
    }  # fmt: skip
    given = provider(list=listed(one, {"name": "m2", "price": 2}), price=sh("""echo '{"m1": 0.25}'"""))
    first, second = asyncio.run(given.machines())
    assert first.capacity == {"cpu": 64_000, "memory": 512 << 30, "gpu": 8000, "example.com/fpga": 2}
    assert (first.state, first.group, first.arch, first.gpu_type) == ("starting", "big", "arm64", "h100")
    assert (first.location, first.startup_ms) == (Location("eu", "a", "", "r7"), 90_000)
    assert (first.cost_milli, first.spot, first.losses_milli, first.progress) == (250, True, 50_000, "it boots")
    assert (second.state, second.cost_milli, second.capacity) == ("off", 2000, {})


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("", "is not what it should be"),
        ("garbage", "is not what it should be"),
        ('{"name": "m1"}', "is not what it should be"),
        ('[{"name": "m1", "color": "red"}]', "unknown field `color`"),
        ('[{"name": "m1", "state": "broken"}]', "Invalid enum value 'broken'"),
        ('[{"name": "m1", "cpu": "many"}]', "many"),
        ('[{"name": "m1", "price": -1}]', "price and losses_per_hour"),
        ('[{"name": "m1", "startup": "soon"}]', "soon"),
        ('[{"name": "../m1"}]', "is not a name for a node"),
        ('[{"name": "m1"}, {"name": "m1"}]', "printed a machine twice"),
    ],
)
def test_output_that_cannot_be_read_is_an_error(printed: str, expected: str) -> None:
    error = error_of(provider(list=("printf", "%s", printed)).machines())
    assert expected in error.message


def test_bytes_that_are_no_text_are_an_error() -> None:
    assert "is not what it should be" in error_of(provider(list=sh(r"printf '\377\376'")).machines()).message


def test_too_much_output_is_an_error() -> None:
    assert "printed more than" in error_of(provider(list=sh(f"head -c {MAX_OUTPUT + 1} /dev/zero")).machines()).message


def test_an_exit_code_is_an_error_with_the_last_words_of_the_program() -> None:
    error = error_of(provider(list=sh("echo '[]'; echo no route to the rack >&2; exit 3")).machines())
    assert error.message == "`list` of backend lab ended with 3: no route to the rack"
    assert error.code == BackendError.code


def test_a_failed_start_is_in_doubt_and_a_failed_stop_is_not() -> None:
    failing = provider(start=sh("exit 1"), stop=sh("exit 1"))
    assert error_of(failing.start(JOINS)).code == IN_DOUBT
    assert error_of(failing.stop(["m1"])).code == BackendError.code


def test_a_program_that_does_not_exist_is_named() -> None:
    error = error_of(provider(list=("/does/not/exist",)).machines())
    assert error.message == "`list` of backend lab cannot be run: No such file or directory: /does/not/exist"


def test_a_program_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    hanging = provider(start=sh(f"sleep 300 & echo $$ $! >{pids}; wait"), timeout="1s")
    error = error_of(hanging.start(JOINS))
    assert error.code == IN_DOUBT
    assert error.message == "`start` of backend lab did not end within 1 s and was killed"
    found = [int(pid) for pid in pids.read_text().split()]
    ends = time.monotonic() + 30
    while any(alive(pid) for pid in found):
        assert time.monotonic() < ends, found
        time.sleep(0.01)


def test_what_a_program_leaves_running_is_not_waited_for(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    leaving = provider(start=sh(f"setsid sleep 300 & echo $! >{pid}"))
    try:
        assert asyncio.run(asyncio.wait_for(leaving.start(JOINS), 30)) == {}
    finally:
        os.kill(int(pid.read_text()), 9)


def test_tokens_go_through_standard_input_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HODEI_TOKEN", "token-of-the-server")
    seen = tmp_path / "seen"
    script = f'cat >{seen}.in; echo "$@" >{seen}.args; env >{seen}.env'
    assert asyncio.run(provider(start=sh(script)).start(JOINS)) == {}
    assert json.loads(Path(f"{seen}.in").read_text()) == {
        "machines": [{"name": n, "url": "https://hodei.example", "token": f"hode_secret_of_{n}"} for n in ("m1", "m2")]
    }
    assert Path(f"{seen}.args").read_text() == "m1 m2\n"
    env = Path(f"{seen}.env").read_text()
    assert "HODEI_BACKEND=lab" in env
    assert "hode_secret" not in env
    assert "token-of-the-server" not in env


def test_a_start_may_ignore_its_input() -> None:
    many = {f"m{n}": Join(f"m{n}", "https://hodei.example", "x" * 100) for n in range(3000)}
    assert asyncio.run(provider(start=TRUE).start(many)) == {}


def test_a_start_can_refuse_single_machines() -> None:
    printed = {"refused": {"m1": {"reason": "no host is free"}, "m2": {"code": "QUOTA"}, "other": {}}}
    answer = asyncio.run(provider(start=sh(f"echo '{json.dumps(printed)}'")).start(JOINS))
    assert {name: (error.code, error.message) for name, error in answer.items()} == {
        "m1": (NO_CAPACITY, "no host is free"),
        "m2": ("QUOTA", "the machine cannot be started now"),
    }


def test_a_stop_gets_the_names(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    asyncio.run(provider(stop=sh(f'echo "$@" >{seen}')).stop(["m2", "m1"]))
    assert seen.read_text() == "m2 m1\n"


@pytest.mark.parametrize("changes", [{"list": ()}, {"start": ("a\0b",)}, {"timeout": "0s"}, {"timeout": "2m"}])
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = Settings(**{"list": TRUE, "start": TRUE, "stop": TRUE, **changes})
    hub = AgentHub(AgentRegistry(lambda: 0), lambda: 0)
    with pytest.raises(InvalidInput, match=r"backends\.lab\."):
        make("lab", settings, BackendContext("test", 1, tmp_path, SystemClock(), agents=hub))
