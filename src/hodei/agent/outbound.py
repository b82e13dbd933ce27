"""A joined agent: it dials out to its server, and carries the agent's protocol over a reliable channel of HTTP exchanges.

One request hangs until the server has messages; a second connection sends the agent's own at once. So the host needs no
open port, and NAT, proxies and cut connections cost only time. The protocol is that of `service`; a new session begins
with `hello` and `known`, like a new connection to the socket. `hodei.backends.remote` is the other side.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import sys
from typing import Any

from hodei.agent import proc
from hodei.agent.channel import Batch, Channel, ChannelBroken
from hodei.agent.clock import ServerClock
from hodei.agent.credentials import CREDENTIAL_PREFIX, Joined, digest_of, new_secret
from hodei.agent.https import Address, Answer, HttpConnection, Unreachable
from hodei.agent.service import Connection, Service

# Not imported: the agent imports nothing of the package around it.
__version__: str = sys.modules["hodei"].__version__
PROTOCOL = 1
API = "/api/v1/agent"
HOLD_MS = 50_000
REQUEST_TIMEOUT_S = 30.0
BACKOFF_S, BACKOFF_MAX_S = 0.1, 30.0
# A connection that is cut while it waits says nothing about the server.
CUT_BACKOFF_MAX_S = 1.0
REFUSED_BACKOFF_MAX_S = 120.0
USER_AGENT = f"hodei-agent/{__version__}"


class SessionOver(Exception):
    """The server does not know this session any more, or it cannot be continued."""


class Refused(Exception):
    """The server refuses this agent; the message says why."""


class Backoff:
    """Pauses that double, each up to half shorter by chance, so that agents do not return all at once."""

    def __init__(self) -> None:
        self._next_s = BACKOFF_S

    def reset(self) -> None:
        self._next_s = BACKOFF_S

    async def pause(self, max_s: float) -> None:
        pause_s = min(self._next_s, max_s)
        self._next_s = min(self._next_s * 2, REFUSED_BACKOFF_MAX_S)
        await asyncio.sleep(pause_s * random.uniform(0.5, 1))


class _ChannelTransport:
    """What `Connection` needs of a transport, over a channel. One write is one line."""

    def __init__(self, channel: Channel, written: asyncio.Event, over: asyncio.Event) -> None:
        self._channel, self._written, self._over = channel, written, over

    def write(self, data: bytes) -> None:
        try:
            self._channel.send(data.decode().rstrip("\n"))
        except ChannelBroken as error:
            print(f"{error}; starting a new session", file=sys.stderr)
            self._over.set()
            return
        self._written.set()

    def get_write_buffer_size(self) -> int:
        return 0  # the channel has its own limit

    def close(self) -> None:
        self._over.set()

    abort = close


class Dialer:
    """Keeps a session with the server of `joined` as long as the agent runs."""

    def __init__(self, home: str, joined: Joined, address: Address, service: Service, facts: dict[str, Any]) -> None:
        self._home, self._joined, self._address = home, joined, address
        self._service, self._facts = service, facts
        self.clock = ServerClock()
        self._said = ""

    async def run(self) -> None:
        backoff = Backoff()
        while True:
            try:
                await self._session(backoff)
            except SessionOver:
                await backoff.pause(CUT_BACKOFF_MAX_S)
            except Refused as error:
                self._say(f"the server refuses this agent: {error}")
                await backoff.pause(REFUSED_BACKOFF_MAX_S)

    def _say(self, text: str) -> None:
        """Once, until something else is said."""
        if text != self._said:
            self._said = text
            print(text, file=sys.stderr, flush=True)

    async def _session(self, backoff: Backoff) -> None:
        channel, written, over = Channel(), asyncio.Event(), asyncio.Event()
        session = _Session(self, secrets.token_hex(16), channel, written, over)
        connection = Connection(self._service)
        session.connection = connection
        tasks: list[asyncio.Task[Any]] = []
        try:
            await session.open(backoff)
            self._say(f"connected to {self._joined.url} as node {self._joined.node}")
            connection.connection_made(_ChannelTransport(channel, written, over))  # type: ignore[arg-type]
            opened_s = asyncio.get_running_loop().time()
            tasks = [
                asyncio.create_task(session.receive(), name="receive"),
                asyncio.create_task(session.send(), name="send"),
                asyncio.create_task(over.wait(), name="over"),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if asyncio.get_running_loop().time() - opened_s > BACKOFF_MAX_S:
                backoff.reset()
            for task in done:
                task.result()
            raise SessionOver
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            connection.connection_lost(None)
            session.close()

    def hello(self) -> dict[str, Any]:
        joined = self._joined
        return {
            "protocol": PROTOCOL,
            "version": __version__,
            "instance": joined.instance,
            "place": _place(self._home),
            "facts": self._facts,
            "labels": joined.labels,
            "taints": joined.taints,
            "offline_ok_ms": joined.offline_ok_ms,
        }

    async def exchange(self, http: HttpConnection, fields: dict[str, Any], timeout_s: float) -> Answer:
        """SessionOver, Refused or Unreachable."""
        sent_ms = proc.boot_clock_ms()
        fields["skew_ms"] = self.clock.skew_ms()
        answer = await http.post(f"{API}/exchange", fields, self._joined.credential, timeout_s)
        if answer.status == 401 and self._joined.next:
            # The answer to a rotation was lost, and the new credential was used before a crash.
            answer = await http.post(f"{API}/exchange", fields, self._joined.next, timeout_s)
            if answer.status == 200:
                self._use_next()
        if answer.status == 200:
            self.clock.observe(sent_ms, int(answer.body["now_ms"]))
            return answer
        if answer.code == "SESSION_OVER":
            raise SessionOver
        if answer.status in (401, 403, 409, 422):
            raise Refused(answer.message)
        raise Unreachable(answer.message, connected=False)

    async def rotate(self, http: HttpConnection) -> None:
        """Replace the credential. Both are on disk until the server has confirmed the new one."""
        joined = self._joined
        if not joined.next:
            joined.next = new_secret(CREDENTIAL_PREFIX)
            joined.save(self._home)
        body = {"digest": digest_of(joined.next)}
        answer = await http.post(f"{API}/rotate", body, joined.credential, REQUEST_TIMEOUT_S)
        if answer.status == 200:
            self._use_next()

    def _use_next(self) -> None:
        self._joined.credential, self._joined.next = self._joined.next, ""
        self._joined.save(self._home)

    def connection(self) -> HttpConnection:
        return HttpConnection(self._address, USER_AGENT)


class _Session:
    connection: Connection

    def __init__(self, dialer: Dialer, id: str, channel: Channel, written: asyncio.Event, over: asyncio.Event) -> None:
        self._dialer, self._id, self._channel = dialer, id, channel
        self._written, self._over = written, over
        self._receiver, self._sender = dialer.connection(), dialer.connection()
        self._hold_ms = HOLD_MS

    async def open(self, backoff: Backoff) -> None:
        while True:
            try:
                fields = {"session": self._id, "hello": self._dialer.hello(), **self._channel.batch().as_fields()}
                answer = await self._dialer.exchange(self._sender, fields, REQUEST_TIMEOUT_S)
                backoff.reset()
                self._hold_ms = int(answer.body.get("hold_ms", HOLD_MS))
                return
            except Unreachable as error:
                self._dialer._say(f"the server is unreachable: {error}")
                await backoff.pause(BACKOFF_MAX_S)

    async def receive(self) -> None:
        """Ask for messages, forever."""
        backoff = Backoff()
        while True:
            fields = {"session": self._id, "hold_ms": self._hold_ms}
            fields |= self._channel.batch(with_messages=False).as_fields()
            try:
                answer = await self._dialer.exchange(self._receiver, fields, self._hold_ms / 1000 + 10)
            except Unreachable as error:
                await backoff.pause(CUT_BACKOFF_MAX_S if error.connected else BACKOFF_MAX_S)
                continue
            backoff.reset()
            self._take(answer)
            if answer.body.get("rotate"):
                with contextlib.suppress(Unreachable, OSError):
                    await self._dialer.rotate(self._receiver)

    async def send(self) -> None:
        """Send our messages as soon as there are some, until they are acknowledged."""
        backoff = Backoff()
        while True:
            await self._written.wait()
            self._written.clear()
            while self._channel.pending:
                fields = {"session": self._id, "hold_ms": 0, **self._channel.batch().as_fields()}
                try:
                    answer = await self._dialer.exchange(self._sender, fields, REQUEST_TIMEOUT_S)
                except Unreachable as error:
                    await backoff.pause(CUT_BACKOFF_MAX_S if error.connected else BACKOFF_MAX_S)
                    continue
                backoff.reset()
                self._take(answer)

    def _take(self, answer: Answer) -> None:
        body = answer.body
        try:
            new = self._channel.receive(Batch(int(body["ack"]), int(body["first"]), list(body["messages"])))
        except (ChannelBroken, KeyError, TypeError, ValueError) as error:
            print(f"the server's answer cannot be used: {error}; starting a new session", file=sys.stderr)
            raise SessionOver from None
        if self._channel.pending:
            self._written.set()
        for line in new:
            self.connection.data_received(line.encode() + b"\n")

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()


def _place(home: str) -> str:
    """Names this boot of this host and this directory: a copy of the home elsewhere is another place."""
    lock = os.stat(f"{home}/lock")
    return digest_of(f"{proc.boot_id()} {lock.st_dev} {lock.st_ino}")[:32]


async def enrol(
    address: Address, token: str, joined: Joined, *, facts: dict[str, Any], attempts_s: float = 120.0
) -> Joined:
    """Exchange a one-time token for the credential in `joined`, which this host has chosen. Refused if the server does not
    accept the token; Unreachable if it does not answer. May be repeated with the same arguments."""
    http, backoff = HttpConnection(address, USER_AGENT), Backoff()
    body = {
        "digest": digest_of(joined.credential),
        "instance": joined.instance,
        "node": joined.node,
        "hostname": facts["hostname"],
        "protocol": PROTOCOL,
        "version": __version__,
    }
    deadline_s = asyncio.get_running_loop().time() + attempts_s
    try:
        while True:
            try:
                answer = await http.post(f"{API}/enrol", body, token, REQUEST_TIMEOUT_S)
                if answer.status == 200:
                    joined.node, joined.backend = str(answer.body["node"]), str(answer.body["backend"])
                    return joined
                if answer.status < 500 and answer.status != 429:
                    raise Refused(answer.message)
            except Unreachable as error:
                if asyncio.get_running_loop().time() > deadline_s:
                    raise
                print(f"the server is unreachable, trying again: {error}", file=sys.stderr, flush=True)
            await backoff.pause(BACKOFF_MAX_S)
    finally:
        http.close()
