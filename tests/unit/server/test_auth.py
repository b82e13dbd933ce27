from __future__ import annotations

import os
import stat

import pytest

from hodei.model.errors import Conflict, InvalidInput
from hodei.server.auth import Tokens, add_token, create_token, new_token, open_tokens, well_formed


def test_the_first_token_is_readable_by_its_owner_only_and_stored_as_a_hash(tmp_path):
    token = create_token(tmp_path)
    assert (tmp_path / "token").read_text().strip() == token
    assert token not in (tmp_path / "tokens").read_text()
    for name in ("token", "tokens"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    found = Tokens.load(tmp_path / "tokens").find(token)
    assert found is not None
    assert (found.name, found.role) == ("admin", "admin")
    assert sorted(os.listdir(tmp_path)) == ["token", "tokens"]


def test_the_umask_does_not_matter(tmp_path):
    before = os.umask(0)
    try:
        create_token(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


def test_an_existing_token_file_or_link_is_never_written_to(tmp_path):
    target = tmp_path / "elsewhere"
    (tmp_path / "token").symlink_to(target)
    with pytest.raises(Conflict):
        create_token(tmp_path)
    assert not target.exists()
    assert not (tmp_path / "tokens").exists()


def test_a_token_has_a_prefix_and_a_checksum():
    token = new_token()
    assert token.startswith("hod_")
    assert len(token) == 4 + 40 + 7
    assert well_formed(token)
    altered = token[:10] + ("a" if token[10] != "a" else "b") + token[11:]
    assert not well_formed(altered)
    assert not well_formed(token[:-1])
    assert not well_formed("hod_ünï")


def test_opening_a_home_creates_one_token(tmp_path):
    tokens, created = open_tokens(tmp_path)
    assert created
    token = (tmp_path / "token").read_text().strip()
    (tmp_path / "token").unlink()
    again, created_again = open_tokens(tmp_path)
    assert not created_again
    assert tokens.find(token) == again.find(token) is not None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_token_file_that_others_can_read_is_refused(tmp_path, mode):
    create_token(tmp_path)
    (tmp_path / "tokens").chmod(mode)
    with pytest.raises(InvalidInput) as error:
        Tokens.load(tmp_path / "tokens")
    assert "chmod 600" in error.value.hint


@pytest.mark.parametrize(
    "text", ["admin admin", "admin root " + "0" * 64, "admin admin xyz", "a b c d", "../x admin " + "0" * 64]
)
def test_a_malformed_token_file_names_its_line(tmp_path, text):
    file = tmp_path / "tokens"
    file.write_text("# comment\n\n" + text + "\n")
    file.chmod(0o600)
    with pytest.raises(InvalidInput, match="line 3"):
        Tokens.load(file)


def test_a_missing_file_a_link_and_a_directory_are_refused(tmp_path):
    create_token(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "tokens")
    for name in ("nothing", "link", "."):
        with pytest.raises(InvalidInput):
            Tokens.load(tmp_path / name)


def test_token_changes_apply_without_a_restart(tmp_path):
    now = 0.0
    file = tmp_path / "tokens"
    first = add_token(file, "ann", "user")
    tokens = Tokens.load(file, monotonic=lambda: now)
    old = tokens.find(first)
    assert old is not None
    assert (old.name, old.role) == ("ann", "user")
    assert tokens.current(old)
    second = add_token(file, "ann", "viewer")
    now = 1.5
    assert tokens.find(first) is None
    new = tokens.find(second)
    assert new is not None
    assert (new.name, new.role) == ("ann", "viewer")
    assert not tokens.current(old)
    file.chmod(0o644)
    now = 3.0
    assert tokens.find(second) is None, "a readable token file was accepted"


def test_a_token_that_was_replaced_by_one_of_the_same_name_and_role_is_not_current(tmp_path):
    now = 0.0
    file = tmp_path / "tokens"
    first = add_token(file, "ann", "user")
    tokens = Tokens.load(file, monotonic=lambda: now)
    old = tokens.find(first)
    assert old is not None
    add_token(file, "ann", "user")
    now = 1.5
    assert not tokens.current(old)


def test_the_role_of_a_user_is_the_lowest_of_all_tokens_of_that_name(tmp_path):
    file = tmp_path / "tokens"
    add_token(file, "ann", "admin")
    add_token(file, "bob", "user")
    file.write_text(file.read_text() + f"ann user {'0' * 64}\n")
    tokens = Tokens.load(file)
    assert [tokens.role_of(name) for name in ("ann", "bob", "cid")] == ["user", "user", None]


def test_names_and_roles_are_checked(tmp_path):
    for name, role in (("a b", "user"), ("", "user"), ("a\nroot admin", "user"), ("ann", "root")):
        with pytest.raises(InvalidInput):
            add_token(tmp_path / "tokens", name, role)


def test_a_mistyped_token_and_an_unknown_one_have_different_messages(call):
    good = new_token()
    unknown = call("GET", "/api/v1/jobs", role="", headers={"authorization": f"Bearer {good}"})
    mistyped = call("GET", "/api/v1/jobs", role="", headers={"authorization": f"Bearer {good[:-2]}"})
    assert unknown.status == mistyped.status == 401
    assert "not known" in unknown.json["message"]
    assert "mistyped" in mistyped.json["message"]
