"""Kind `command`: machines that four programs list, start, stop and price, as Slurm's ResumeProgram does.

So OpenStack, Proxmox, libvirt, Terraform or a rack of smart plugs can be driven without Python. See
docs/how-to/command-backend.md for what the programs get and print.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from hodei.backends.base import BackendContext
from hodei.backends.remote.backend import Patience
from hodei.backends.remote.machines import Join, Machine, MachineBackend, MachineState
from hodei.backends.remote.registry import check_node_name
from hodei.model.capacity import NO_CAPACITY
from hodei.model.config import Duration, Span
from hodei.model.errors import IN_DOUBT, BackendError, BackendRefused, InvalidInput
from hodei.model.ids import NodeName
from hodei.model.node import Location
from hodei.model.resources import (
    CPU,
    GPU,
    MEMORY,
    STORAGE,
    parse_duration_ms,
    parse_quantity,
    parse_resources,
    scale_of,
)

MAX_OUTPUT = 8 << 20
MAX_MACHINES = 10_000
# Programs get these variables of the server, and none of its secrets.
_ENV = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "USER")


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """`list`, `start`, `stop` and `price` are commands as lists of words. `url`: where new machines reach this server."""

    list: tuple[str, ...]
    start: tuple[str, ...]
    stop: tuple[str, ...]
    price: tuple[str, ...] = ()
    url: str = ""
    timeout: Span = "45s"
    away_after: Span = "60s"
    lost_after: Duration = "10m"


class Listed(Struct, frozen=True, forbid_unknown_fields=True):
    """One machine as `list` prints it."""

    name: str
    state: MachineState = "off"
    group: str = "machines"
    cpu: str | int | float = 0
    memory: str | int = 0
    storage: str | int = 0
    gpu: str | int = 0
    resources: dict[str, str | int] = {}
    labels: dict[str, str] = {}
    arch: str = ""
    gpu_type: str = ""
    region: str = ""
    zone: str = ""
    rack: str = ""
    startup: Duration = "2m"
    price: float = 0.0
    spot: bool = False
    losses_per_hour: float = 0.0
    progress: str = ""
    problem: str = ""


class _Refusal(Struct, frozen=True):
    code: str = NO_CAPACITY
    reason: str = ""


class _Started(Struct, frozen=True):
    refused: dict[str, _Refusal] = {}


_decode_list = msgspec.json.Decoder(list[Listed]).decode
_decode_started = msgspec.json.Decoder(_Started).decode
_decode_prices = msgspec.json.Decoder(dict[str, float]).decode


class CommandProvider:
    """`MachineProvider` by programs."""

    def __init__(self, name: str, settings: Settings) -> None:
        self._name, self._settings = name, settings
        self._timeout_s = parse_duration_ms(settings.timeout) / 1000

    async def machines(self) -> list[Machine]:
        listed = self._decode("list", _decode_list, await self._run("list", self._settings.list))
        if len(listed) > MAX_MACHINES:
            raise BackendError(f"`list` printed {len(listed)} machines, at most {MAX_MACHINES} are read")
        prices: dict[str, float] = {}
        if self._settings.price:
            prices = self._decode("price", _decode_prices, await self._run("price", self._settings.price))
        try:
            machines = [_machine(one, prices.get(one.name, one.price)) for one in listed]
        except InvalidInput as error:
            raise BackendError(f"`list` of backend {self._name}: {error.message}") from None
        if len({machine.name for machine in machines}) < len(machines):
            raise BackendError("`list` printed a machine twice")
        return machines

    async def start(self, joins: Mapping[NodeName, Join]) -> dict[NodeName, BackendError | BackendRefused]:
        document = {"machines": [{"name": j.node, "url": j.url, "token": j.token} for j in joins.values()]}
        output = await self._run("start", (*self._settings.start, *joins), document)
        if not output.strip():
            return {}
        refused = self._decode("start", _decode_started, output).refused
        return {
            name: BackendError(one.reason or "the machine cannot be started now", code=one.code)
            for name, one in refused.items()
            if name in joins
        }

    async def stop(self, names: Sequence[NodeName]) -> None:
        await self._run("stop", (*self._settings.stop, *names))

    def _decode(self, what: str, decode: Any, output: bytes) -> Any:
        try:
            return decode(output)
        except msgspec.MsgspecError as error:
            raise BackendError(
                f"the output of `{what}` of backend {self._name} is not what it should be: {error}",
                hint="docs/how-to/command-backend.md shows its form",
            ) from None

    async def _run(self, what: str, command: Sequence[str], document: Any = None) -> bytes:
        """Its output. Secrets go through its standard input, never through its arguments."""
        # Files, not pipes: what the program leaves running may keep its output open.
        # The input is in memory: it holds secrets, and a program that does not read it must not break a pipe.
        with (
            os.fdopen(os.memfd_create("input"), "w+b") as given,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
        ):
            given.write(b"" if document is None else json.dumps(document).encode())
            given.seek(0)
            code = await self._run_to_end(what, command, given, out, err)
            out.seek(0)
            err.seek(0)
            output, words = out.read(MAX_OUTPUT + 1), err.read(MAX_OUTPUT).decode(errors="replace").strip()[-300:]
        if code:
            text = f"`{what}` of backend {self._name} ended with {code}"
            # A start that failed may have started some of them.
            raise BackendError(f"{text}: {words}" if words else text, code=IN_DOUBT if what == "start" else "")
        if len(output) > MAX_OUTPUT:
            raise BackendError(f"`{what}` of backend {self._name} printed more than {MAX_OUTPUT >> 20} MiB")
        return output

    async def _run_to_end(self, what: str, command: Sequence[str], given: Any, out: Any, err: Any) -> int:
        env = {name: value for name, value in os.environ.items() if name in _ENV}
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=given, stdout=out, stderr=err,
                env={**env, "HODEI_BACKEND": self._name}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise BackendError(
                f"`{what}` of backend {self._name} cannot be run: {error.strerror}: {command[0]}"
            ) from None
        try:
            async with asyncio.timeout(self._timeout_s):
                await process.wait()
        except TimeoutError:
            text = f"`{what}` of backend {self._name} did not end within {self._timeout_s:g} s and was killed"
            raise BackendError(text, code=IN_DOUBT if what == "start" else "") from None
        finally:
            if process.returncode is None:
                _kill_group(process.pid)
                await process.wait()
        return process.returncode or 0


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, 9)
    except ProcessLookupError:
        pass


def _machine(listed: Listed, price: float) -> Machine:
    """InvalidInput for a value that cannot be read."""
    check_node_name(listed.name)
    amounts = {CPU: listed.cpu, MEMORY: listed.memory, STORAGE: listed.storage, GPU: listed.gpu}
    capacity = {name: parse_quantity(amount, scale=scale_of(name)) for name, amount in amounts.items() if amount}
    if not 0 <= price <= 1e6 or not 0 <= listed.losses_per_hour <= 1e6:
        raise InvalidInput(f"machine {listed.name[:80]!r}: price and losses_per_hour are from 0 to 1,000,000")
    return Machine(
        name=listed.name,
        state=listed.state,
        group=listed.group,
        capacity=capacity | parse_resources(listed.resources),
        labels=listed.labels,
        arch=listed.arch,
        gpu_type=listed.gpu_type,
        location=Location(listed.region, listed.zone, "", listed.rack),
        startup_ms=parse_duration_ms(listed.startup),
        cost_milli=round(price * 1000),
        spot=listed.spot,
        losses_milli=round(listed.losses_per_hour * 1_000_000),
        progress=listed.progress,
        problem=listed.problem,
    )


class CommandBackend(MachineBackend):
    kind = "command"


def make(name: str, settings: Settings, context: BackendContext) -> CommandBackend:
    for key in ("list", "start", "stop"):
        words = getattr(settings, key)
        if not words or any("\0" in word for word in words):
            raise InvalidInput(
                f"backends.{name}.{key} is empty", hint=f'a command as a list of words: {key} = ["/opt/{key}-machines"]'
            )
    if not 1000 <= parse_duration_ms(settings.timeout) <= 45_000:
        raise InvalidInput(f"backends.{name}.timeout is from 1s to 45s")
    patience = Patience(parse_duration_ms(settings.away_after), parse_duration_ms(settings.lost_after))
    return CommandBackend(name, context, patience, CommandProvider(name, settings), url=settings.url)
