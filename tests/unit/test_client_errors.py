"""The client raises only its own errors, with a message and a code, never those of a library."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from hodei.client import Client, ServerUnreachable
from hodei.model.errors import HodeiError, InvalidInput


@contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """A server that sends these bytes, one entry for each connection, and closes it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for answer in answers:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(answer)
        listener.close()  # later connections are refused

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # ends the accept of the thread
        thread.join(5)
        listener.close()


CALLS: dict[str, Callable[[Client], object]] = {
    "jobs": lambda client: list(client.jobs()),
    "job": lambda client: client.job(1),
    "submit": lambda client: client.submit(command=["true"]),
    "wait": lambda client: client.wait(1),
    "logs": lambda client: list(client.logs(1)),
    "events": lambda client: list(client.events()),
    "stream": lambda client: next(client.stream(0)),
    "by name": lambda client: client.cancel("sweep"),
    "config": lambda client: client.set_config(b""),
}
OK = b"HTTP/1.1 200 OK\r\n"
ANSWERS = {
    "nothing": b"",
    "garbage": b"\x00\xff" * 50 + b"\r\n\r\n",
    "half a header": b"HTTP/1.1 200 OK\r\nContent-Le",
    "half a body": OK + b"Content-Length: 100\r\n\r\n{",
    "an invalid length": OK + b"Content-Length: many\r\n\r\n{}",
    "invalid chunks": OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "not JSON": OK + b"Content-Length: 5\r\n\r\n<html",
    "another shape": OK + b'Content-Length: 9\r\n\r\n{"id": []}'[:9],
    "not UTF-8": OK + b'Content-Length: 6\r\n\r\n{"\xff":1}'[:30],
    "an invalid status": b"HTTP/1.1 wrong\r\n\r\n",
    "an invalid error": b"HTTP/1.1 500 Oh\r\nContent-Length: 3\r\n\r\n\xff\xfe\xfd",
    "a redirect": b"HTTP/1.1 302 Found\r\nLocation: http://example.com\r\nContent-Length: 0\r\n\r\n",
    "invalid offsets": OK + b"Hodei-Next-Offset: far\r\nHodei-Run: x.y.z\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("answer", ANSWERS)
def test_any_answer_of_a_server_raises_only_hodei_errors(call: str, answer: str):
    with answering(*[ANSWERS[answer]] * 3) as address, Client(address, "token", timeout_s=5, retry_s=0) as client:
        raised: BaseException | None = None
        try:
            CALLS[call](client)
        except Exception as error:
            raised = error
        if raised is None:
            assert call == "logs"  # an empty answer is an empty log
        else:
            assert isinstance(raised, HodeiError), repr(raised)
            assert raised.code
            assert raised.message


@pytest.mark.parametrize(
    "address",
    ["http://[::1", "http://127.0.0.1:99999", "ftp://x", "http://", f"http://{'a' * 70}.example", "http://a b", "http://x\x7f", "http://127.0.0.1:1"],
)  # fmt: skip
def test_an_unusable_address_is_a_hodei_error(address: str):
    with Client(address, "token", timeout_s=5) as client, pytest.raises((InvalidInput, ServerUnreachable)) as refused:
        client.info()
    assert refused.value.message
    with Client(address, "token", timeout_s=5) as client, pytest.raises((InvalidInput, ServerUnreachable)):
        next(client.stream(0))


@pytest.mark.parametrize("key", ["two\nlines", "ключ"])
def test_an_invalid_idempotency_key_is_a_hodei_error(key: str):
    with answering(b"") as address, Client(address, "token", timeout_s=5) as client, pytest.raises(InvalidInput):
        client.submit(command=["true"], key=key)


def test_an_unreadable_job_file_is_a_hodei_error(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with Client("http://127.0.0.1:1") as client:
        for path in (tmp_path / "none.yaml", tmp_path, tmp_path / "binary.yaml", "a\x00b"):
            with pytest.raises(InvalidInput):
                client.submit(path)
