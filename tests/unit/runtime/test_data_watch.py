"""Data dependencies, with real files and a real HTTP server. Does not test slow disks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from hodei.model.dependency import AllowedData
from hodei.model.facts import DataAppeared, Fact
from hodei.runtime.dependency_lookup import DataWatch, exists


@pytest.fixture
def web() -> Iterator[tuple[str, list[str]]]:
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            requests.append(self.path)
            self.send_response({"/data": 200, "/moved": 302}.get(self.path, 404))
            if self.path == "/moved":
                self.send_header("Location", "/data")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_file_exists(tmp_path: Path) -> None:
    allowed, file = AllowedData([f"{tmp_path}/open/"]), tmp_path / "open" / "x.csv"
    assert not exists(str(file), allowed)
    file.parent.mkdir()
    file.touch()
    assert exists(str(file), allowed)


def test_a_link_does_not_reveal_files_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "secret").touch()
    (tmp_path / "open" / "link").symlink_to(tmp_path / "secret")
    assert not exists(f"{tmp_path}/open/link", AllowedData([f"{tmp_path}/open/"]))
    assert exists(f"{tmp_path}/open/link", AllowedData([f"{tmp_path}/"]))


def test_a_url_exists_without_following_redirects(web: tuple[str, list[str]]) -> None:
    address, requests = web
    allowed = AllowedData([f"{address}/"])
    assert exists(f"{address}/data", allowed)
    assert not exists(f"{address}/absent", allowed)
    assert not exists(f"{address}/moved", allowed)
    assert requests == ["/data", "/absent", "/moved"]
    assert not exists("http://127.0.0.1:1/data", AllowedData(["http://127.0.0.1:1/"]))


def test_a_url_that_is_not_allowed_is_never_requested(web: tuple[str, list[str]]) -> None:
    address, requests = web
    assert not exists(f"{address}/data", AllowedData(["https://elsewhere/"]))
    assert requests == []


def test_checks_back_off_and_stop_without_waiting_jobs() -> None:
    checked: list[str] = []
    facts: list[Fact] = []
    paths = ["/data/x"]

    async def scenario() -> None:
        def check(path: str, allowed: AllowedData) -> bool:
            checked.append(path)
            return len(checked) == 3

        watch = DataWatch(lambda: paths, facts.extend, AllowedData(["/data/"]), check)
        for now_s in (0.0, 0.5, 1.0, 2.0, 2.5):
            watch.poll(now_s)
            await asyncio.gather(*watch._checks.values())
            await asyncio.sleep(0)
        assert facts == [DataAppeared("/data/x")]
        paths.clear()
        watch.poll(100.0)
        assert not watch._checks

    asyncio.run(scenario())
    assert len(checked) == 3


def test_a_slow_check_does_not_delay_others() -> None:
    release = threading.Event()
    facts: list[Fact] = []

    async def scenario() -> None:
        def check(path: str, allowed: AllowedData) -> bool:
            return release.wait(10) if path == "/data/slow" else True

        watch = DataWatch(lambda: ["/data/slow", "/data/fast"], facts.extend, AllowedData(["/data/"]), check)
        watch.poll(0.0)
        await watch._checks["/data/fast"]
        await asyncio.sleep(0)
        assert facts == [DataAppeared("/data/fast")]
        watch.poll(50.0)
        assert list(watch._checks).count("/data/slow") == 1
        release.set()
        await asyncio.gather(*watch._checks.values())

    asyncio.run(scenario())
