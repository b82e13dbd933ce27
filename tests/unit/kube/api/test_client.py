"""The client: requests, retries and error messages."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from hodei.kube.api.client import Access, Api, ApiError
from hodei.model.errors import InvalidInput
from unit.kube.api.scripted_server import CLOSE, answer, connected, server


def status(code: int, reason: str = "", message: str = "", **details: object) -> bytes:
    return json.dumps(
        {"kind": "Status", "code": code, "reason": reason, "message": message, "details": details}
    ).encode()


def test_a_request_has_the_path_parameters_body_and_token(tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("secret\n")

    async def exchange() -> bytes:
        async with server(answer(201, b"made")) as scripted, connected(scripted, token, "/k8s/one/") as api:
            got = await api.request("POST", "/api/v1/pods", b"{1}", params={"fieldSelector": "a=b,c!=d", "x": "y z"})
            assert got == b"made"
            return scripted.requests[0]

    head, body = asyncio.run(exchange()).split(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /k8s/one/api/v1/pods?fieldSelector=a%3Db%2Cc%21%3Dd&x=y%20z HTTP/1.1"
    assert {"Authorization: Bearer secret", "Content-Type: application/json", "Content-Length: 3"} <= set(lines)
    assert body == b"{1}"


def test_a_path_cannot_inject_a_second_request():
    async def exchange() -> bytes:
        async with server(answer(200)) as scripted, connected(scripted) as api:
            await api.request("GET", "/api/v1/pods/x HTTP/1.1\r\nHost: evil\r\n\r\n")
            return scripted.requests[0]

    assert asyncio.run(exchange()).startswith(
        b"GET /api/v1/pods/x%20HTTP/1.1%0D%0AHost:%20evil%0D%0A%0D%0A HTTP/1.1\r\n"
    )


def test_a_refusal_has_its_status_reason_and_causes():
    cause = {"reason": "FieldValueInvalid", "field": "spec.x", "message": "too long"}
    body = status(422, "Invalid", "Pod is invalid", causes=[cause])

    async def exchange() -> ApiError:
        async with server(answer(422, body)) as scripted, connected(scripted) as api:
            with pytest.raises(ApiError) as failed:
                await api.request("POST", "/api/v1/pods", b"{}")
            return failed.value

    error = asyncio.run(exchange())
    assert (error.status, error.reason) == (422, "Invalid")
    assert error.message == "POST /api/v1/pods: the Kubernetes API answered 422 Invalid: Pod is invalid"
    assert error.causes == ("FieldValueInvalid: spec.x: too long",)
    assert not error.retriable


@pytest.mark.parametrize("body", [b"", b"<html>\n bad  gateway </html>", b"[]", b'{"code": "x"}', b"\xff\xfe"])
def test_an_error_response_without_a_status_object_is_an_api_error(body: bytes):
    async def exchange() -> ApiError:
        async with server(answer(418, body)) as scripted, connected(scripted) as api:
            with pytest.raises(ApiError) as failed:
                await api.request("GET", "/x")
            return failed.value

    assert asyncio.run(exchange()).status == 418


def test_an_unreachable_api_is_reported_with_a_hint():
    async def exchange() -> ApiError:
        async with server() as scripted:
            port = scripted.port
        with pytest.raises(ApiError) as failed:
            await Api.connect(Access(server=f"http://127.0.0.1:{port}"))
        return failed.value

    error = asyncio.run(exchange())
    assert (error.status, error.reason) == (0, "Unreached")
    assert "no answer from the Kubernetes API at http://127.0.0.1:" in error.message
    assert "kubectl get --raw /readyz" in error.hint
    assert error.retriable


def test_a_post_without_an_answer_has_an_unknown_outcome():
    async def exchange() -> ApiError:
        async with server(CLOSE) as scripted, connected(scripted) as api:
            with pytest.raises(ApiError) as failed:
                await api.request("POST", "/x", b"{}")
            assert len(scripted.requests) == 1
            return failed.value

    assert "It may or may not have been carried out." in asyncio.run(exchange()).message


def test_after_401_the_credentials_are_renewed_and_the_request_is_repeated_once(tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("old")

    async def exchange() -> list[bytes]:
        async with server(answer(200), answer(401), answer(200, b"in"), answer(401), answer(401)) as scripted:
            async with connected(scripted, token) as api:
                await api.request("GET", "/a")
                token.write_text("new")
                assert await api.request("POST", "/b", b"{}") == b"in"
                with pytest.raises(ApiError) as failed:
                    await api.request("POST", "/c", b"{}")
                assert "kubectl auth whoami" in failed.value.hint
            return scripted.requests

    requests = asyncio.run(exchange())
    assert [b"Bearer new" in request for request in requests] == [False, False, True, True, True]


def test_a_changed_token_file_is_read_again(tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("old")

    async def exchange() -> list[bytes]:
        async with server(answer(200), answer(200), answer(200)) as scripted, connected(scripted, token) as api:
            now = [0.0]
            api._monotonic = lambda: now[0]
            api._renew_at = 30.0
            await api.request("GET", "/a")
            token.write_text("newer")
            await api.request("GET", "/b")
            now[0] = 31.0
            await api.request("GET", "/c")
            return scripted.requests

    assert [b"Bearer newer" in request for request in asyncio.run(exchange())] == [False, False, True]


def test_a_missing_token_file_keeps_the_old_token(tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("old")

    async def exchange() -> None:
        async with server(answer(200)) as scripted, connected(scripted, token) as api:
            api._renew_at = 0.0
            token.unlink()
            await api.request("GET", "/a")
            assert b"Bearer old" in scripted.requests[0]

    asyncio.run(exchange())


def test_a_token_that_could_forge_headers_is_refused(tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("a\r\nImpersonate-User: admin")

    async def exchange() -> None:
        async with server() as scripted:
            with pytest.raises(InvalidInput, match="contains invalid characters"):
                async with connected(scripted, token):
                    pass

    asyncio.run(exchange())


def record_pauses(api: Api) -> list[float]:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    api._sleep = sleep
    return pauses


@pytest.mark.parametrize(
    ("method", "first", "pauses"),
    [
        pytest.param("POST", answer(429, status(429), "Retry-After: 3"), [3.0], id="a post with Retry-After"),
        pytest.param("POST", answer(429, status(429), "Retry-After: 600"), [10.0], id="a long Retry-After is cut"),
        pytest.param("GET", answer(503, status(503)), [0.2], id="a get with 503"),
        pytest.param("GET", CLOSE, [0.2], id="a get without an answer"),
    ],
)
def test_retriable_errors_are_retried(method: str, first: bytes, pauses: list[float]):
    async def exchange() -> None:
        async with server(first, answer(200, b"yes")) as scripted, connected(scripted) as api:
            waited = record_pauses(api)
            assert await api.request(method, "/x", b"{}" if method == "POST" else None) == b"yes"
            assert waited == pauses

    asyncio.run(exchange())


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(answer(503, status(503)), id="503"),
        pytest.param(
            answer(429, status(429, causes=[{"reason": "DisruptionBudget"}], retryAfterSeconds=10), "Retry-After: 10"),
            id="a disruption budget",
        ),
        pytest.param(answer(429, status(429)), id="429 without Retry-After"),
        pytest.param(answer(409, status(409, "Conflict")), id="a conflict"),
    ],
)
def test_a_post_is_not_repeated_after(first: bytes):
    async def exchange() -> None:
        async with server(first) as scripted, connected(scripted) as api:
            with pytest.raises(ApiError):
                await api.request("POST", "/x", b"{}")
            assert len(scripted.requests) == 1

    asyncio.run(exchange())


def test_retries_are_bounded():
    async def exchange() -> None:
        async with server(*[answer(429, status(429), "Retry-After: 1")] * 9) as scripted, connected(scripted) as api:
            waited = record_pauses(api)
            with pytest.raises(ApiError) as failed:
                await api.request("GET", "/x")
            assert (failed.value.status, failed.value.retry_after_s) == (429, 1.0)
            assert (len(scripted.requests), len(waited)) == (5, 4)

    asyncio.run(exchange())


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def lines_of(api: Api, **options: float) -> list[bytes]:
    return [line async for batch in api.stream("/w", {"watch": "true"}, **options) for line in batch]  # type: ignore[arg-type]


def test_a_stream_yields_whole_lines_for_any_chunks():
    sent = CHUNKED + chunk(b"one\ntw") + chunk(b"o\nthree\n\nfo") + chunk(b"ur") + b"0\r\n\r\n"

    async def exchange() -> list[bytes]:
        async with server(sent) as scripted, connected(scripted) as api:
            return await lines_of(api)

    assert asyncio.run(exchange()) == [b"one", b"two", b"three", b"", b"four"]


def test_a_stream_without_lines_yields_raw_chunks():
    async def exchange() -> bytes:
        sent = CHUNKED + chunk(b"one\ntw") + chunk(b"o") + b"0\r\n\r\n"
        async with server(sent) as scripted, connected(scripted) as api:
            return b"|".join([b"".join(batch) async for batch in api.stream("/log", lines=False)]).replace(b"|", b"")

    assert asyncio.run(exchange()) == b"one\ntwo"


def test_a_stream_that_is_cut_yields_its_lines_and_then_raises():
    def cut(writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + chunk(b"one\n"))
        writer.close()

    async def exchange() -> list[bytes]:
        async with server(cut) as scripted, connected(scripted) as api:
            stream = api.stream("/w")
            got = await anext(stream)
            with pytest.raises(ApiError) as failed:
                await anext(stream)
            assert failed.value.status == 0
        return got

    assert asyncio.run(exchange()) == [b"one"]


def test_a_silent_stream_times_out():
    def silence(writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)

    async def exchange() -> None:
        async with server(silence) as scripted, connected(scripted) as api:
            with pytest.raises(ApiError, match=r"no data for 0\.05 s"):
                await lines_of(api, idle_timeout_s=0.05)

    asyncio.run(exchange())


def test_a_stream_that_is_refused_raises_the_refusal():
    async def exchange() -> None:
        async with server(answer(410, status(410, "Expired", "too old"))) as scripted, connected(scripted) as api:
            with pytest.raises(ApiError) as failed:
                await lines_of(api)
            assert (failed.value.status, failed.value.reason) == (410, "Expired")

    asyncio.run(exchange())


def test_a_stream_renews_credentials_after_401(tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("old")

    async def exchange() -> None:
        sent = CHUNKED + chunk(b"one\n") + b"0\r\n\r\n"
        async with server(answer(401), sent) as scripted, connected(scripted, token) as api:
            token.write_text("newer")
            assert await lines_of(api) == [b"one"]
            assert b"Bearer newer" in scripted.requests[1]

    asyncio.run(exchange())


def test_a_slow_reader_limits_the_buffered_lines():
    line = b"x" * 65535 + b"\n"
    count = 1000  # 64 MB

    async def flood(writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        for _ in range(count):
            writer.write(chunk(line))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    async def exchange() -> None:
        async with server(flood) as scripted, connected(scripted) as api:
            got = most = 0
            async for batch in api.stream("/w"):
                got += len(batch)
                most = max(most, len(batch))
                for _ in range(50):
                    await asyncio.sleep(0)
            assert got == count
            assert most < 400, "the stream was not limited by its reader"

    asyncio.run(exchange())


def test_a_closed_client_raises():
    async def exchange() -> None:
        async with server() as scripted, connected(scripted) as api:
            await api.close()
            with pytest.raises(ApiError, match="this client was closed"):
                await api.request("POST", "/x", b"")

    asyncio.run(exchange())
