from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hodei.cli import times
from hodei.cli.main import cli
from unit.cli.stub import NOW_MS, TOKEN, Stub


@pytest.fixture(autouse=True)
def a_clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HODEI_SERVER", "HODEI_TOKEN", "HODEI_TOKEN_FILE", "HODEI_OUTPUT", "HODEI_DEBUG", "HODEI_CA_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HODEI_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(times, "now_ms", lambda: NOW_MS)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    server = Stub().start()
    monkeypatch.setenv("HODEI_SERVER", server.address)
    monkeypatch.setenv("HODEI_TOKEN", TOKEN)
    yield server
    server.stop()


@pytest.fixture
def hodei() -> Callable[..., Result]:
    """`hodei("jobs", "-a")`: the command as on a shell; it raises nothing but SystemExit."""

    def call(*args: str, input: str | bytes | None = None) -> Result:
        result = CliRunner().invoke(cli, list(args), input=input)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return call
