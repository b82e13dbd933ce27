"""BMCs: Redfish by sushy, IPMI by pyghmi. Both libraries block, so everything here is called in threads, and never twice at
the same time for one BMC.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal, Protocol

import sushy
import sushy.auth
import sushy.connector
from msgspec import Struct
from pyghmi.exceptions import IpmiException
from pyghmi.ipmi.command import Command
from pyghmi.ipmi.private.session import Session

from hodei.backends.bare_metal.settings import MachineSettings, ipmi_address, password_of, redfish_url
from hodei.model.errors import BackendError
from hodei.model.resources import CPU, MEMORY, Resources

Power = Literal["off", "starting", "on", "stopping"]
# Libraries that log each failed request: the provider logs when a BMC goes away and comes back.
logging.getLogger("sushy").setLevel(logging.CRITICAL)

_POWER: dict[Any, Power] = {
    sushy.PowerState.ON: "on",
    sushy.PowerState.OFF: "off",
    sushy.PowerState.POWERING_ON: "starting",
    sushy.PowerState.POWERING_OFF: "stopping",
    sushy.PowerState.PAUSED: "on",
}
_BOOTING = {
    "PrimaryProcessorInitializationStarted": "it initializes its processors",
    "SecondaryProcessorInitializationStarted": "it initializes its processors",
    "BusInitializationStarted": "it initializes its buses",
    "MemoryInitializationStarted": "it initializes its memory",
    "PCIResourceConfigStarted": "it configures its PCI devices",
    "SystemHardwareInitializationComplete": "its hardware is initialized",
    "SetupEntered": "it is in its BIOS setup",
    "OSBootStarted": "its operating system boots",
    "OSRunning": "its operating system runs",
}


class Reading(Struct, frozen=True):
    """What a BMC says about its machine. `watts` 0: it does not say."""

    power: Power
    progress: str = ""
    capacity: Resources = {}
    watts: int = 0


class BmcError(Exception):
    """A request failed. `in_doubt`: it may have been carried out."""

    def __init__(self, text: str, *, in_doubt: bool = False) -> None:
        super().__init__(text)
        self.in_doubt = in_doubt


class Bmc(Protocol):
    """Every method may raise BmcError."""

    def read(self) -> Reading: ...

    def power_on(self) -> None: ...

    def shut_down(self) -> None:
        """Ask the operating system."""
        ...

    def power_off(self) -> None: ...


def make_bmc(machine: MachineSettings, timeout_s: float) -> Bmc:
    return Redfish(machine, timeout_s) if machine.protocol == "redfish" else Ipmi(machine)


class Redfish:
    def __init__(self, machine: MachineSettings, timeout_s: float) -> None:
        self._machine, self._timeout_s = machine, timeout_s
        self._system: Any = None
        self._password = ""
        self._metrics = ""  # the resource with the power draw; "-": there is none

    def read(self) -> Reading:
        reading: Reading = self._call(self._read)
        return reading

    def power_on(self) -> None:
        self._call(lambda system: self._reset(system, sushy.ResetType.ON, sushy.ResetType.FORCE_ON), in_doubt=True)

    def shut_down(self) -> None:
        self._call(lambda system: self._reset(system, sushy.ResetType.GRACEFUL_SHUTDOWN), in_doubt=True)

    def power_off(self) -> None:
        self._call(lambda system: self._reset(system, sushy.ResetType.FORCE_OFF), in_doubt=True)

    def _reset(self, system: Any, *wanted: Any) -> None:
        """The first kind of reset that the BMC offers."""
        offered = system.get_allowed_reset_system_values()
        system.reset_system(next((each for each in wanted if each in offered), wanted[0]))

    def _call(self, work: Callable[[Any], Any], *, in_doubt: bool = False) -> Any:
        opened = False
        try:
            password = password_of(self._machine)
            if self._system is None or password != self._password:
                self._system, self._password = self._open(password), password
            opened = True
            return work(self._system)
        except BackendError as error:
            raise BmcError(error.message) from None
        except Exception as error:  # BMCs answer with anything, and sushy raises what its parsers do
            self._system = None
            raise BmcError(_describe(error, self._password), in_doubt=in_doubt and opened) from None

    def _open(self, password: str) -> Any:
        machine, url = self._machine, redfish_url(self._machine.address)
        self._connector = sushy.connector.Connector(
            url,
            verify=False if machine.insecure_tls else machine.ca or True,
            # One try: the provider repeats, and a BMC that is away must not hold a thread for a minute.
            server_side_retries=1,
            server_side_retries_delay=1,
            default_request_timeout=self._timeout_s,
        )
        # Basic authentication leaves no session behind: BMCs allow few, and a killed server could not end its own.
        auth = sushy.auth.BasicAuth(machine.user or None, password or None)
        root = sushy.Sushy(url, auth=auth, connector=self._connector)
        return root.get_system(f"/redfish/v1/Systems/{machine.system}" if machine.system else None)

    def _read(self, system: Any) -> Reading:
        system.refresh(force=True)
        power = _POWER.get(system.power_state)
        if power is None:
            raise BmcError("it does not say whether the machine is on")
        body = system.json
        last = (body.get("BootProgress") or {}).get("LastState")
        watts = self._watts(body) if power == "on" else 0
        return Reading(power, _BOOTING.get(str(last), "") if power == "on" else "", _inventory(body), watts)

    def _watts(self, body: dict[str, Any]) -> int:
        if self._metrics == "-":
            return 0
        try:
            if not self._metrics:
                self._metrics = self._find_metrics(body)
            return _power_draw(self._get(self._metrics)) if self._metrics != "-" else 0
        except Exception:  # the draw is a bonus: a BMC without it still switches its machine
            self._metrics = "-"
            return 0

    def _find_metrics(self, body: dict[str, Any]) -> str:
        for link in (body.get("Links") or {}).get("Chassis") or ():
            chassis = self._get(link["@odata.id"])
            for key in ("EnvironmentMetrics", "Power"):
                path = (chassis.get(key) or {}).get("@odata.id")
                if path and _power_draw(self._get(path)):
                    return str(path)
        return "-"

    def _get(self, path: str) -> Any:
        return self._connector.get(path).json()


def _power_draw(body: dict[str, Any]) -> int:
    """Of EnvironmentMetrics, or of the older Power."""
    reading = (body.get("PowerWatts") or {}).get("Reading")
    if reading is None:
        reading = sum(each.get("PowerConsumedWatts") or 0 for each in body.get("PowerControl") or ())
    return round(reading)


def _inventory(body: dict[str, Any]) -> Resources:
    out: Resources = {}
    processors, memory = body.get("ProcessorSummary") or {}, body.get("MemorySummary") or {}
    # `Count` is that of the sockets on most machines: better too little than nothing.
    cpus = processors.get("LogicalProcessorCount") or processors.get("CoreCount") or processors.get("Count")
    if isinstance(cpus, int) and cpus > 0:
        out[CPU] = cpus * 1000
    if isinstance(gib := memory.get("TotalSystemMemoryGiB"), int | float) and gib > 0:
        out[MEMORY] = int(gib * 2**30)
    return out


class Ipmi:
    """One session per call: BMCs allow few, and end idle ones."""

    def __init__(self, machine: MachineSettings) -> None:
        self._machine = machine
        self._host, self._port = ipmi_address(machine.address, machine.name)
        self._tells_watts = True

    def read(self) -> Reading:
        reading: Reading = self._call(self._read)
        return reading

    def power_on(self) -> None:
        self._call(lambda command: command.set_power("on"), in_doubt=True)

    def shut_down(self) -> None:
        self._call(lambda command: command.set_power("shutdown"), in_doubt=True)

    def power_off(self) -> None:
        self._call(lambda command: command.set_power("off"), in_doubt=True)

    def _call(self, work: Callable[[Any], Any], *, in_doubt: bool = False) -> Any:
        command, password = None, ""
        try:
            password = password_of(self._machine)
            user = (self._machine.user or "").encode()
            command = Command(bmc=self._host, userid=user, password=password.encode(), port=self._port)
            return work(command)
        except BackendError as error:
            raise BmcError(error.message) from None
        except Exception as error:  # pyghmi raises what its parsers do
            text = _describe(error, password)
            raise BmcError(text, in_doubt=in_doubt and command is not None) from None
        finally:
            if command is not None:
                command.ipmi_session.logout()
            # pyghmi would use the session that was logged out again.
            key = (self._host, (self._machine.user or "").encode(), password.encode(), self._port, None)
            Session.initting_sessions.pop(key, None)

    def _read(self, command: Any) -> Reading:
        power: Power = "on" if command.get_power().get("powerstate") == "on" else "off"
        return Reading(power, watts=self._watts(command) if power == "on" else 0)

    def _watts(self, command: Any) -> int:
        """By DCMI, which not every BMC has."""
        if not self._tells_watts:
            return 0
        try:
            return int(command.get_system_power_watts() or 0)
        except Exception:
            self._tells_watts = False
            return 0


def _describe(error: Exception, password: str) -> str:
    if isinstance(error, IpmiException) and str(error) in ("", "None"):
        return "no answer"
    text = " ".join(str(error).split()) or type(error).__name__
    if password:
        text = text.replace(password, "***")
    return text[:300]
