"""The HTTP client: framing, keep-alive, and which requests are repeated."""

from __future__ import annotations

import asyncio

import pytest

from hodei.http_client import Origin, Pool, Unreached
from unit.kube.api.scripted_server import CLOSE, Server, answer, server

GET = b"GET / HTTP/1.1\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi"


def pool(scripted: Server, connections: int = 4) -> Pool:
    return Pool(Origin("127.0.0.1", scripted.port), connections)


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", id="with a length"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", id="in chunks"
        ),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", id="after 100"),
    ],
)
def test_an_answer_is_complete_and_its_connection_is_reused(sent: bytes):
    async def exchange() -> None:
        async with server(sent, sent) as scripted:
            client = pool(scripted)
            for _ in range(2):
                reply = await client.exchange("GET", GET, 5)
                assert (reply.status, reply.body) == (200, b"hello")
            assert scripted.connections == 1

    asyncio.run(exchange())


def test_an_answer_in_single_bytes_is_read():
    async def drip(writer: asyncio.StreamWriter) -> None:
        for byte in answer(201, b"hello"):
            writer.write(bytes([byte]))
            await writer.drain()

    async def exchange() -> None:
        async with server(drip) as scripted:
            reply = await pool(scripted).exchange("GET", GET, 5)
            assert (reply.status, reply.body) == (201, b"hello")

    asyncio.run(exchange())


def test_an_answer_without_a_length_ends_with_the_connection():
    def until_closed(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhello")
        writer.close()

    async def exchange() -> None:
        async with server(until_closed, answer(200)) as scripted:
            client = pool(scripted)
            assert (await client.exchange("GET", GET, 5)).body == b"hello"
            assert (await client.exchange("GET", GET, 5)).body == b"{}"
            assert scripted.connections == 2

    asyncio.run(exchange())


def test_a_large_answer_is_complete():
    body = b"0123456789abcdef" * (1 << 20)

    async def exchange() -> None:
        async with server(answer(200, body)) as scripted:
            assert (await pool(scripted).exchange("GET", GET, 20)).body == body

    asyncio.run(exchange())


def test_a_connection_with_connection_close_is_not_reused():
    async def exchange() -> None:
        async with server(answer(200, b"{}", "Connection: close"), answer(200)) as scripted:
            client = pool(scripted)
            await client.exchange("GET", GET, 5)
            await client.exchange("GET", GET, 5)
            assert scripted.connections == 2

    asyncio.run(exchange())


def test_a_get_on_a_closed_idle_connection_is_repeated():
    async def exchange() -> None:
        async with server(answer(200), CLOSE, answer(202)) as scripted:
            client = pool(scripted)
            await client.exchange("GET", GET, 5)
            assert (await client.exchange("GET", GET, 5)).status == 202
            assert scripted.connections == 2

    asyncio.run(exchange())


def test_a_post_that_may_have_arrived_is_not_repeated():
    async def exchange() -> None:
        async with server(answer(200), CLOSE, answer(202)) as scripted:
            client = pool(scripted)
            await client.exchange("GET", GET, 5)
            with pytest.raises(Unreached) as failed:
                await client.exchange("POST", POST, 5)
            assert failed.value.sent
            assert len(scripted.requests) == 2

    asyncio.run(exchange())


def test_a_post_on_a_connection_closed_while_idle_uses_a_new_one():
    def then_close(writer: asyncio.StreamWriter) -> None:
        writer.write(answer(200))
        writer.close()

    async def exchange() -> None:
        async with server(then_close, answer(201)) as scripted:
            client = pool(scripted)
            await client.exchange("GET", GET, 5)
            async with asyncio.timeout(5):
                while client._idle and client._idle[0].usable:  # noqa: ASYNC110 - a socket's end sets no event
                    await asyncio.sleep(0)
            assert (await client.exchange("POST", POST, 5)).status == 201

    asyncio.run(exchange())


def test_a_new_connection_that_is_closed_at_once_is_an_error():
    async def exchange() -> None:
        async with server(CLOSE, CLOSE, CLOSE) as scripted:
            with pytest.raises(Unreached, match="closed"):
                await pool(scripted).exchange("GET", GET, 5)
            assert scripted.connections == 1

    asyncio.run(exchange())


def test_an_answer_cut_in_the_middle_is_an_error():
    def cut(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhel")
        writer.close()

    async def exchange() -> None:
        async with server(cut) as scripted:
            with pytest.raises(Unreached, match="closed"):
                await pool(scripted).exchange("GET", GET, 5)

    asyncio.run(exchange())


def test_a_server_that_does_not_answer_times_out_and_a_get_is_not_repeated():
    def silence(writer: asyncio.StreamWriter) -> None:
        pass

    async def exchange() -> None:
        async with server(answer(200), silence, answer(200)) as scripted:
            client = pool(scripted)
            await client.exchange("GET", GET, 5)
            with pytest.raises(Unreached, match=r"within 0\.05 s"):
                await client.exchange("GET", GET, 0.05)
            assert (await client.exchange("GET", GET, 5)).status == 200

    asyncio.run(exchange())


@pytest.mark.parametrize("later", [False, True], ids=["with the first", "later"])
def test_an_unrequested_answer_is_not_used_for_the_next_request(later: bool):
    async def two(writer: asyncio.StreamWriter) -> None:
        writer.write(answer(200, b"own"))
        if later:
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.write(answer(200, b"stray"))

    async def exchange() -> None:
        async with server(two, answer(200, b"second")) as scripted:
            client = pool(scripted)
            assert (await client.exchange("GET", GET, 5)).body == b"own"
            await asyncio.sleep(0.05 if later else 0)
            assert (await client.exchange("GET", GET, 5)).body == b"second"

    asyncio.run(exchange())


def test_an_answer_that_is_not_http_is_an_error():
    async def exchange() -> None:
        async with server(b"SSH-2.0-OpenSSH_9\r\n\r\n") as scripted:
            with pytest.raises(Unreached, match="not HTTP"):
                await pool(scripted).exchange("GET", GET, 5)

    asyncio.run(exchange())


def test_a_refused_connection_is_an_error():
    async def exchange() -> None:
        async with server() as scripted:
            port = scripted.port
        with pytest.raises(Unreached, match=r"Connect call failed|refused"):
            await Pool(Origin("127.0.0.1", port)).exchange("GET", GET, 5)

    asyncio.run(exchange())


def test_the_pool_limits_concurrent_exchanges_and_serves_all():
    running = max_running = 0

    async def slowly(writer: asyncio.StreamWriter) -> None:
        nonlocal running, max_running
        running += 1
        max_running = max(max_running, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        writer.write(answer(200))

    async def exchange() -> None:
        async with server(*[slowly] * 20) as scripted:
            client = pool(scripted, connections=3)
            replies = await asyncio.gather(*(client.exchange("GET", GET, 5) for _ in range(20)))
            assert [reply.status for reply in replies] == [200] * 20
            assert scripted.connections <= 3
            assert max_running <= 3

    asyncio.run(exchange())


def test_a_cancelled_exchange_leaves_no_half_read_connection():
    def silence(writer: asyncio.StreamWriter) -> None:
        pass

    async def exchange() -> None:
        async with server(silence, answer(200, b"own")) as scripted:
            client = pool(scripted, connections=1)
            first = asyncio.create_task(client.exchange("GET", GET, 5))
            async with asyncio.timeout(5):
                while not scripted.requests:  # noqa: ASYNC110 - a request sets no event either
                    await asyncio.sleep(0)
            waiting = asyncio.create_task(client.exchange("GET", GET, 5))
            first.cancel()
            assert (await waiting).body == b"own"

    asyncio.run(exchange())


def test_no_old_connection_is_reused_after_new_certificates():
    async def exchange() -> None:
        async with server(answer(200), answer(200)) as scripted:
            client = pool(scripted)
            await client.exchange("GET", GET, 5)
            client.retire(client.origin)
            await client.exchange("GET", GET, 5)
            assert scripted.connections == 2

    asyncio.run(exchange())


def test_a_proxy_gets_connect_and_its_refusal_is_reported():
    async def exchange() -> None:
        async with server(b"HTTP/1.1 200 OK\r\n\r\n", answer(200, b"proxied")) as scripted:
            origin = Origin("kubernetes.example", 6443, proxy=f"http://me:secret@127.0.0.1:{scripted.port}")
            assert (await Pool(origin).exchange("GET", GET, 5)).body == b"proxied"
            assert scripted.requests[0].startswith(b"CONNECT kubernetes.example:6443 HTTP/1.1\r\n")
            assert b"Proxy-Authorization: Basic bWU6c2VjcmV0" in scripted.requests[0]
        async with server(answer(407)) as scripted:
            origin = Origin("kubernetes.example", 6443, proxy=f"http://127.0.0.1:{scripted.port}")
            with pytest.raises(Unreached, match=r"the proxy 127\.0\.0\.1 answered 'HTTP/1\.1 407 X'"):
                await Pool(origin).exchange("GET", GET, 5)

    asyncio.run(exchange())
