"""Kind `bare_metal`: its settings, and the state of machines whose BMCs answer, hang, lie or are away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_host import until
from hodei.backends.bare_metal import provider as provider_module
from hodei.backends.bare_metal.bmc import BmcError, Power, Reading
from hodei.backends.bare_metal.provider import BmcProvider
from hodei.backends.bare_metal.settings import MachineSettings, Settings, machines_of, password_of
from hodei.backends.remote.machines import Join, Machine
from hodei.model.errors import IN_DOUBT, NOT_REACHED, BackendError, BackendRefused, InvalidInput

NOW_MS = 1_800_000_000_000


class FakeBmc:
    """`away`: it does not answer. `fails`: the next order fails so. `obeys`: its operating system shuts down."""

    def __init__(self) -> None:
        self.power: Power = "off"
        self.away, self.obeys, self.slow = False, True, False
        self.fails: BmcError | None = None
        self.orders: list[str] = []
        self.go = threading.Event()

    def read(self) -> Reading:
        if self.slow:
            self.go.wait(30)
        if self.away:
            raise BmcError("no answer")
        return Reading(
            self.power, "it boots" if self.power == "on" else "", {"cpu": 4000}, 90 if self.power == "on" else 0
        )

    def _order(self, name: str) -> None:
        self.orders.append(name)
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error

    def power_on(self) -> None:
        self._order("on")
        self.power = "on"

    def shut_down(self) -> None:
        self._order("shut_down")
        if self.obeys:
            self.power = "off"

    def power_off(self) -> None:
        self._order("off")
        self.power = "off"


class Given:
    """A provider of machines `a` and `b`."""

    def __init__(self, home: Path, *, shutdown_timeout: str = "1m", timeout_s: float = 5) -> None:
        machines = tuple(MachineSettings(name, f"10.0.0.{n}") for n, name in enumerate(("a", "b"), 1))
        self.settings = machines_of("rack", Settings(machines, shutdown_timeout=shutdown_timeout))
        self.bmcs = {"a": FakeBmc(), "b": FakeBmc()}
        self.home, self.timeout_s = home, timeout_s
        self.open()

    def open(self) -> None:
        self.provider = BmcProvider(
            [(each, self.bmcs[each.name]) for each in self.settings], timeout_s=self.timeout_s, now_ms=lambda: NOW_MS,
            state_file=self.home / "rack" / "machines.json",
        )  # fmt: skip

    async def machine(self, name: str = "a") -> Machine:
        return next(machine for machine in await self.provider.machines() if machine.name == name)

    async def start(self, *names: str) -> dict[str, Any]:
        return await self.provider.start({name: Join(name, "", "") for name in names})


def check(given: Given, work: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        try:
            await work()
        finally:
            for bmc in given.bmcs.values():
                bmc.go.set()
            await given.provider.close()

    asyncio.run(run())


@pytest.fixture(autouse=True)
def repeat_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider_module, "_SHORTEST_PAUSE_S", 0.001)
    monkeypatch.setattr(provider_module, "_LONGEST_PAUSE_S", 0.001)


def test_a_machine_is_switched_on_once(tmp_path: Path) -> None:
    given = Given(tmp_path)

    async def work() -> None:
        assert (await given.machine()).state == "off"
        assert await given.start("a") == {}
        machine = await given.machine()
        assert (machine.state, machine.progress) == ("on", "it boots; its agent has not connected yet")
        assert await given.start("a") == {}
        assert given.bmcs["a"].orders == ["on"]
        assert given.provider.watts == {"a": 90}

    check(given, work)


def test_a_bmc_that_says_off_after_the_order_is_believed_only_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Given(tmp_path)

    async def work() -> None:
        await given.start("a")
        given.bmcs["a"].power = "off"
        assert (await given.machine()).state == "starting"
        monkeypatch.setattr(provider_module, "POWER_ON_S", 0.0)
        assert (await given.machine()).state == "off"

    check(given, work)


def test_a_bmc_that_is_away_never_looks_like_a_machine_that_is_off(tmp_path: Path) -> None:
    given = Given(tmp_path)

    async def work() -> None:
        await given.start("a")
        await given.provider.machines()
        for bmc in given.bmcs.values():
            bmc.away = True
        await given.provider.machines()
        on, off = await given.machine("a"), await given.machine("b")
        text = "its BMC has been out of reach since 2027-01-15 08:00 UTC: no answer"
        assert (on.state, on.progress, on.problem) == ("on", text, "")
        assert (off.state, off.problem) == ("off", text)
        # Also to a server that starts while it is away.
        await given.provider.close()
        given.open()
        assert ((await given.machine("a")).state, (await given.machine("b")).state) == ("on", "off")

    check(given, work)


def test_a_bmc_that_hangs_holds_up_no_other(tmp_path: Path) -> None:
    given = Given(tmp_path, timeout_s=0.05)

    async def work() -> None:
        given.bmcs["a"].slow = True
        await given.provider.machines()
        given.bmcs["b"].power = "on"
        await until(lambda: given.provider._members["a"].away_ms, "a is away")
        async with asyncio.timeout(10):
            assert (await given.machine("b")).state == "on"
        assert "no answer within 0.1 s" in (await given.machine("a")).problem

    check(given, work)


def test_starts_that_fail_say_whether_they_may_have_arrived(tmp_path: Path) -> None:
    given = Given(tmp_path)

    async def work() -> None:
        given.bmcs["a"].away = True
        given.bmcs["b"].fails = BmcError("timed out", in_doubt=True)
        answer = await given.start("a", "b")
        assert isinstance(answer["a"], BackendRefused)
        assert isinstance(answer["b"], BackendError)
        assert answer["b"].code == IN_DOUBT
        given.bmcs["b"].fails = BmcError("the order is not allowed")
        answer = await given.start("b")
        assert isinstance(answer["b"], BackendRefused)

    check(given, work)


def test_a_machine_that_shuts_down_is_not_cut_off(tmp_path: Path) -> None:
    given = Given(tmp_path)

    async def work() -> None:
        await given.start("a")
        await given.provider.stop(["a"])
        await given.provider.stop(["a"])
        assert (await given.machine()).state in ("stopping", "off")
        await until(lambda: not given.provider._members["a"].is_stopping, "it is off")
        assert (await given.machine()).state == "off"
        assert given.bmcs["a"].orders == ["on", "shut_down"]

    check(given, work)


@pytest.mark.parametrize("refuses", [False, True])
def test_a_machine_that_does_not_shut_down_is_cut_off(tmp_path: Path, refuses: bool) -> None:
    given = Given(tmp_path, shutdown_timeout="1m" if refuses else "10ms")
    given.bmcs["a"].obeys = False

    async def work() -> None:
        await given.start("a")
        given.bmcs["a"].fails = BmcError("it cannot") if refuses else None
        await given.provider.stop(["a"])
        await until(lambda: given.bmcs["a"].power == "off", "its power is cut")
        assert given.bmcs["a"].orders[-1] == "off"

    check(given, work)


def test_a_machine_whose_bmc_goes_away_is_stopped_when_that_is_back(tmp_path: Path) -> None:
    given = Given(tmp_path)

    async def work() -> None:
        await given.start("a")
        given.bmcs["a"].away = True
        await given.provider.stop(["a"])
        await until(lambda: given.provider._members["a"].away_ms, "its BMC is away")
        assert (await given.machine()).state == "stopping"
        answer = await given.start("a")
        assert answer["a"].code == NOT_REACHED
        given.bmcs["a"].away = False
        await until(lambda: given.bmcs["a"].power == "off", "it is off")
        assert given.bmcs["a"].orders == ["on", "shut_down"]

    check(given, work)


def test_states_that_cannot_be_read_are_ignored(tmp_path: Path) -> None:
    file = tmp_path / "rack" / "machines.json"
    file.parent.mkdir()
    for content in ("garbage", "[]", '{"a": 1}', '{"a": {}}'):
        file.write_text(content)
        assert Given(tmp_path).provider._members["a"].reading is None


def test_machines_have_the_values_of_the_backend_unless_they_set_their_own(tmp_path: Path) -> None:
    settings = Settings(
        (
            MachineSettings("a", "10.0.0.1"),
            MachineSettings("b", "10.0.0.2:6230", protocol="ipmi", user="root", password_env="B_PASSWORD"),
            MachineSettings("c", "10.0.0.3", enabled=False),
        ),
        user="hodei", password_file="/etc/bmc", group="big",
    )  # fmt: skip
    a, b = machines_of("rack", settings)
    assert (a.protocol, a.user, a.password_file, a.group) == ("redfish", "hodei", "/etc/bmc", "big")
    assert (b.protocol, b.user, b.password_file, b.password_env) == ("ipmi", "root", "", "B_PASSWORD")


def test_the_password_comes_from_a_file_or_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("of the file\n")
    monkeypatch.setenv("BMC_PASSWORD", "of the variable")
    assert password_of(MachineSettings("a", "x", password_file=str(tmp_path / "file"))) == "of the file"
    assert password_of(MachineSettings("a", "x", password_env="BMC_PASSWORD")) == "of the variable"
    with pytest.raises(BackendError, match="the variable MISSING"):
        password_of(MachineSettings("a", "x", password_env="MISSING"))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"name": "A b"}, "is not a name for a node"),
        ({"address": "http://10.0.0.1"}, "unencrypted"),
        ({"address": "ftp://10.0.0.1"}, "is not the address of a BMC"),
        ({"address": "https://root:secret@10.0.0.1"}, "is not the address of a BMC"),
        ({"address": "https://10.0.0.1", "protocol": "ipmi"}, "is not host or host:port"),
        ({"password_file": "/a", "password_env": "B"}, "not both"),
        ({"price": -1}, "price of an hour"),
        ({"cpu": "many"}, "many"),
        ({"startup": "soon"}, "soon"),
    ],
)
def test_machines_that_cannot_work_are_refused(fields: dict[str, Any], expected: str) -> None:
    machine = MachineSettings(**{"name": "a", "address": "10.0.0.1", **fields})
    with pytest.raises(InvalidInput, match=expected):
        machines_of("rack", Settings((machine,)))


def test_two_machines_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidInput, match="two machines a"):
        machines_of("rack", Settings((MachineSettings("a", "10.0.0.1"), MachineSettings("a", "10.0.0.2"))))
