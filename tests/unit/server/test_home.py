"""A home whose store is missing: the server refuses to start until the operator decides."""

from __future__ import annotations

import pytest

from hodei.model.errors import InvalidInput
from hodei.server.home import check_store_exists


def a_used_home(tmp_path, *, store: bytes | None = None):
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "journal").write_text("1.0.1 claimed")
    (tmp_path / "tokens").write_text("")
    if store is not None:
        (tmp_path / "hodei.db").write_bytes(store)
    return tmp_path


@pytest.mark.parametrize(("store", "state"), [(None, "is missing"), (b"", "is empty")])
def test_a_home_with_a_missing_or_empty_store_is_refused_and_unchanged(tmp_path, store, state):
    home = a_used_home(tmp_path, store=store)
    before = sorted(home.rglob("*"))
    with pytest.raises(InvalidInput, match=state) as error:
        check_store_exists(home, fresh=False)
    assert error.value.code == "STORE_MISSING"
    assert "--fresh" in error.value.hint
    assert "restore" in error.value.hint
    assert sorted(home.rglob("*")) == before


def test_a_fresh_start_renames_old_files_and_deletes_nothing(tmp_path):
    home = a_used_home(tmp_path)
    (home / "hodei.db-wal").write_text("pending writes")
    renamed = check_store_exists(home, fresh=True)
    assert sorted(path.name.partition(".before-")[0] for path in renamed) == ["agent", "hodei.db-wal"]
    assert next(home.glob("agent.before-*/journal")).read_text() == "1.0.1 claimed"
    assert next(home.glob("hodei.db-wal.before-*")).read_text() == "pending writes"
    assert not (home / "agent").exists()
    assert (home / "tokens").exists()


def test_a_new_home_and_a_home_with_its_store_are_accepted(tmp_path):
    assert check_store_exists(tmp_path, fresh=False) == []
    (tmp_path / "tokens").write_text("prepared")
    (tmp_path / "agent").mkdir()
    assert check_store_exists(tmp_path, fresh=False) == []
    (tmp_path / "agent" / "journal").write_text("1.0.1 claimed")
    (tmp_path / "hodei.db").write_bytes(b"SQLite format 3\0")
    assert check_store_exists(tmp_path, fresh=False) == []
