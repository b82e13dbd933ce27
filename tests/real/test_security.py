"""What holds from the first minute: nobody without a token, nothing readable by others, nothing in the clear beyond here."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from real.house import House, until

pytestmark = pytest.mark.real


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_on_disk_is_for_its_owner_only(house: House) -> None:
    house.up("--decision-log", "decisions.jsonl")
    house.ended(house.submit("sh", "-c", "echo a secret", env={"PASSWORD": "secret"}))
    assert mode(house.home) == 0o700
    for name in ("token", "tokens", "server.json", "hodei.db", "hodei.db-wal", "lock", "decisions.jsonl"):
        assert mode(house.home / name) == 0o600, name
    for path in house.agent_home.rglob("*"):
        assert mode(path) & 0o077 == 0, path
    assert house.token not in (house.home / "tokens").read_text()


@pytest.mark.parametrize("config", [False, True], ids=["empty", "with a configuration in it"])
def test_a_home_that_was_open_to_others_is_closed(house: House, config: bool) -> None:
    house.home.mkdir()
    house.home.chmod(0o755)
    if config:
        house.configure("")
    house.up()
    assert mode(house.home) == 0o700


def test_a_directory_of_something_else_keeps_its_mode(house: House) -> None:
    house.home.mkdir()
    (house.home / "README").touch()
    house.home.chmod(0o755)
    house.up()
    house.stop()
    house.up()
    assert mode(house.home) == 0o755
    assert mode(house.home / "token") == 0o600


def test_a_home_that_is_a_file_is_told(house: House) -> None:
    house.home.touch()
    house.start()
    assert house.server is not None
    assert house.server.wait(20) == 2
    assert "cannot be used as a home" in house.said()


def test_a_token_file_that_others_can_read_is_refused(house: House) -> None:
    house.up()
    house.stop()
    (house.home / "tokens").chmod(0o644)
    house.start()
    assert house.server is not None
    assert house.server.wait(20) == 2
    assert "chmod 600" in house.said()


def test_no_route_opens_without_a_token_or_with_a_wrong_one(house: House) -> None:
    house.up()
    id = house.submit("true")
    paths = house.request("GET", "/api/v1/openapi.json", token="").json["paths"]
    checked, public = 0, set()
    for path, operations in paths.items():
        filled = re.sub(r"{\w+}", str(id), path)
        for method, operation in operations.items():
            if operation["x-policy"] == "public":
                public.add(path)
                continue
            checked += 1
            for token in ("", "wrong", house.token[:-1], house.token + "x", house.token.upper()):
                answer = house.request(method.upper(), filled, token=token)
                assert (answer.status, answer.json["code"]) == (401, "UNAUTHORIZED"), (method, path, token)
                assert answer.headers["www-authenticate"].startswith("Bearer")
            basic = house.request(method.upper(), filled, token="", headers={"Authorization": f"Basic {house.token}"})
            assert basic.status == 401
            in_url = house.request(method.upper(), f"{filled}?token={house.token}", token="")
            assert in_url.status == 401
    assert checked >= 15
    assert public == {"/", "/livez", "/readyz", "/api/v1/openapi.json", "/api/v1/schema/job"}


def test_a_removed_token_shuts_its_holder_out(house: House) -> None:
    house.up()
    assert house.request("GET", "/api/v1/jobs").status == 200
    (house.home / "tokens").write_text("")
    until(lambda: house.request("GET", "/api/v1/jobs").status == 401, "the token is refused", 5)


def test_listening_beyond_this_machine_in_the_clear_needs_a_word(house: House) -> None:
    house.start("--host", "0.0.0.0")
    assert house.server is not None
    assert house.server.wait(20) == 2
    said = house.said()
    assert "without TLS" in said
    assert "--insecure" in said
    assert not (house.home / "hodei.db").exists()
    up = house.hodei("up", "-d", "--host", "0.0.0.0", "--port", "0")
    assert up.code == 1
    assert "without TLS" in up.err


def test_two_servers_in_one_home_are_one_too_many(house: House) -> None:
    house.up()
    second = House(house.home)
    second.log = house.home.parent / "second.log"
    second.start()
    assert second.server is not None
    assert second.server.wait(20) == 1
    assert "is running in" in second.said()
    assert house.hodei("up", "-d", "--port", "0").code == 0  # says so, and leaves it be
    assert "already running" in house.hodei("up", "-d", "--port", "0").err
    house.works()


def test_a_port_that_is_taken_is_told(house: House, tmp_path: Path) -> None:
    house.up()
    port = int(house.address.rsplit(":", 1)[1])
    other = House(tmp_path / "other")
    other.log = tmp_path / "other.log"
    try:
        other.start(port=port)
        assert other.server is not None
        assert other.server.wait(20) == 1
        assert "choose another --port" in other.said()
    finally:
        other.close()


def test_jobs_do_not_see_the_token_or_the_servers_files(house: House) -> None:
    house.up()
    id = house.submit("sh", "-c", "env; ls -l /proc/self/fd")
    house.ended(id)
    said = house.log_of(id)
    assert house.token not in said
    assert "HODEI_HOME" not in said
    assert "hodei.db" not in said
    assert "status" not in said
    assert os.environ.get("HODEI_TOKEN", "hod_") not in said
