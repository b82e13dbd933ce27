"""The WebSocket client against a scripted server: the handshake, frames in pieces, and invalid responses. It does not
prove what a real API server sends: tests/real/kubernetes/test_backend_exec.py does."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from hodei.backends.kubernetes.pod_api import execute
from hodei.http_client import Unreached
from hodei.kube.api import websocket
from hodei.kube.api.client import ApiError
from hodei.kube.api.websocket import MESSAGE_LIMIT
from hodei.model.errors import IN_DOUBT, BackendError, BackendRefused, NotFound
from unit.kube.api.scripted_server import Server, answer, connected, server

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
V5 = "v5.channel.k8s.io"


def switching(scripted: Server, then: bytes, *, protocol: str = V5, accept: bytes = b"", close: bool = True) -> bytes:
    """The head of a successful response to the last request, and what follows it."""
    key = next(line for line in scripted.requests[-1].split(b"\r\n") if line.startswith(b"Sec-WebSocket-Key"))
    proof = accept or base64.b64encode(hashlib.sha1(key.split(b": ")[1] + GUID).digest())
    lines = [b"HTTP/1.1 101 Switching Protocols", b"Upgrade: websocket", b"Connection: Upgrade"]
    lines += [b"Sec-WebSocket-Accept: " + proof, b"Sec-WebSocket-Protocol: " + protocol.encode()]
    return b"\r\n".join(lines) + b"\r\n\r\n" + then


def frame(data: bytes, kind: int = 2, last: bool = True) -> bytes:
    size = bytes((len(data),)) if len(data) < 126 else b"\x7e" + len(data).to_bytes(2, "big")
    return bytes((0x80 * last | kind,)) + size + data


def run_exchange(sent: bytes, exchange: Callable[[Any], Any], **options: Any) -> list[bytes]:
    """Run `exchange(api)` against a server whose WebSocket sends these bytes and closes; returns the requests."""
    requests: list[bytes] = []

    async def main() -> None:
        async with server() as scripted:

            async def upgraded(writer: asyncio.StreamWriter) -> None:
                writer.write(switching(scripted, sent, **options))
                await writer.drain()
                writer.close()

            scripted.answers.append(upgraded)
            async with connected(scripted) as api:
                await exchange(api)
            requests.extend(scripted.requests)

    asyncio.run(main())
    return requests


def test_fragmented_messages_are_joined_and_pings_are_answered():
    sent = frame(b"\x01one") + frame(b"\x01t", last=False) + frame(b"?", kind=9) + frame(b"wo", kind=0)
    sent += frame(b"\x02" + b"x" * 300) + frame(b"\x03\xe8", kind=8)

    async def exchange(api: Any) -> None:
        socket = await api.websocket("/x", [("a", "b c"), ("a", "&")], [V5])
        messages = [await socket.message() for _ in range(4)]
        assert messages == [b"\x01one", b"\x01two", b"\x02" + b"x" * 300, None]
        await socket.close()

    (request,) = run_exchange(sent, exchange)
    assert request.startswith(b"GET /x?a=b%20c&a=%26 HTTP/1.1\r\n")
    assert b"Sec-WebSocket-Protocol: v5.channel.k8s.io\r\n" in request


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x82\x05ab", id="half a frame"),
        pytest.param(b"\x82\x7f" + (MESSAGE_LIMIT + 1).to_bytes(8, "big"), id="far too long"),
        pytest.param(b"\x82\x81\0\0\0\0x", id="masked"),
        pytest.param(frame(b"x", kind=5), id="an unknown kind"),
    ],
)
def test_an_invalid_frame_breaks_the_connection(sent: bytes):
    async def exchange(api: Any) -> None:
        socket = await api.websocket("/x", [], [V5])
        with pytest.raises(Unreached):
            await socket.message()
        await socket.close()

    run_exchange(sent, exchange)


@pytest.mark.parametrize("options", [{"protocol": "v1.other"}, {"accept": b"d3Jvbmc="}], ids=["protocol", "proof"])
def test_a_server_with_another_protocol_is_refused(options: dict[str, Any]):
    async def exchange(api: Any) -> None:
        with pytest.raises(ApiError) as error:
            await api.websocket("/x", [], [V5])
        assert error.value.status == 0

    run_exchange(b"", exchange, **options)


EXIT_7 = b'{"status":"Failure","reason":"NonZeroExitCode","details":{"causes":[{"reason":"ExitCode","message":"7"}]}}'


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (b'{"status":"Success"}', 0),
        (EXIT_7, 7),
        (b'{"status":"Failure","message":"exec: \\"x\\": executable file not found in $PATH"}', 127),
        (b'{"status":"Failure","message":"exec /x: permission denied"}', 126),
    ],
)
def test_the_status_message_has_the_exit_code(status: bytes, code: int):
    sent = frame(b"\x01out") + frame(b"\x02err") + frame(b"\x01put") + frame(b"\x03" + status)

    async def exchange(api: Any) -> None:
        done = await execute(api, "/api/v1/namespaces/a/pods/b", ["x"], 5000)
        assert (done.exit_code, done.stdout, done.stderr) == (code, b"output", b"err")

    run_exchange(sent, exchange)


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(frame(b"\x01out"), id="cut"),
        pytest.param(frame(b"\x01out") + frame(b"", kind=8), id="closed"),
        pytest.param(frame(b"\x03not json"), id="no status"),
        pytest.param(frame(b'\x03{"status":"Failure","message":"connection to the runtime was lost"}'), id="lost"),
    ],
)
def test_a_command_without_a_status_message_has_an_unknown_outcome(sent: bytes):
    async def exchange(api: Any) -> None:
        with pytest.raises(BackendError) as error:
            await execute(api, "/api/v1/namespaces/a/pods/b", ["x"], 5000)
        assert error.value.code == IN_DOUBT

    run_exchange(sent, exchange)


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (403, b"no", BackendRefused), (404, b"no", NotFound), (500, b"container not found", NotFound),
        (500, b"x", BackendError), (429, b"x", BackendError),
    ],
)  # fmt: skip
def test_a_refused_handshake_becomes_the_matching_error(status: int, text: bytes, kind: type[Exception]):
    async def exchange() -> None:
        body = b'{"kind":"Status","message":"%b"}' % text
        async with server(answer(status, body)) as scripted, connected(scripted) as api:
            with pytest.raises(kind, match=text.decode()):
                await execute(api, "/api/v1/namespaces/a/pods/b", ["x"], 5000)

    asyncio.run(exchange())


def test_a_server_that_never_answers_times_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(websocket, "CONNECT_S", 0.1)

    async def exchange() -> None:
        async with server(lambda writer: None) as scripted, connected(scripted) as api:
            with pytest.raises(BackendError, match="no connection within"):
                await execute(api, "/api/v1/namespaces/a/pods/b", ["x"], 60_000)

    asyncio.run(exchange())


def test_a_silent_command_times_out_with_its_output_so_far():
    async def exchange(api: Any) -> None:
        done = await execute(api, "/api/v1/namespaces/a/pods/b", ["x"], 100)
        assert (done.exit_code, done.stdout) == (None, b"out")

    async def main() -> None:
        async with server() as scripted:
            scripted.answers.append(lambda writer: writer.write(switching(scripted, frame(b"\x01out"))))
            async with connected(scripted) as api:
                await exchange(api)

    asyncio.run(main())
