"""A reload reads the file; a missing or empty file changes nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hodei.model.errors import InvalidInput
from hodei.server.__main__ import _config_path, _if_not_empty, _reread

TEXT = "[scheduling]\nmax_losses = 7\n"


def _given(config: Path | None = None) -> SimpleNamespace:
    return SimpleNamespace(config=config, host=None, port=None, decision_log=None)


@pytest.mark.parametrize("named", [False, True], ids=["of the home", "named by --config"])
@pytest.mark.parametrize(
    ("after", "words"), [(None, "does not exist any more|cannot read"), ("", "is empty"), (" \n\n", "is empty")]
)
def test_a_file_that_is_gone_or_empty_is_refused(tmp_path: Path, named: bool, after: str | None, words: str):
    path = tmp_path / ("mine.toml" if named else "config.toml")
    path.write_text(TEXT)
    given = _given(path if named else None)
    before = _if_not_empty(_config_path(given, tmp_path))
    assert _reread(given, tmp_path, before).scheduling.max_losses == 7
    if after is None:
        path.unlink()
    else:
        path.write_text(after)
    with pytest.raises(InvalidInput, match=words):
        _reread(given, tmp_path, before)


def test_a_server_that_never_had_a_file_may_be_reloaded_and_may_get_one(tmp_path: Path):
    assert _reread(_given(), tmp_path, None).scheduling.max_losses == 3
    (tmp_path / "config.toml").write_text(TEXT)
    assert _reread(_given(), tmp_path, None).scheduling.max_losses == 7
