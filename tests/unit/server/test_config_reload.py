"""A reload reads the file; a missing or empty file changes nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hodei.model.errors import InvalidInput
from hodei.server.__main__ import _config_path, _if_not_empty, _reread

TEXT = "[scheduling]\nmax_losses = 7\n"


def _arguments(config: Path | None = None) -> SimpleNamespace:
    return SimpleNamespace(config=config, host=None, port=None, decision_log=None)


@pytest.mark.parametrize("named", [False, True], ids=["in the home", "by --config"])
@pytest.mark.parametrize(
    ("after", "message"), [(None, "does not exist any more|cannot read"), ("", "is empty"), (" \n\n", "is empty")]
)
def test_a_missing_or_empty_file_is_refused(tmp_path: Path, named: bool, after: str | None, message: str):
    path = tmp_path / ("mine.toml" if named else "config.toml")
    path.write_text(TEXT)
    arguments = _arguments(path if named else None)
    before = _if_not_empty(_config_path(arguments, tmp_path))
    assert _reread(arguments, tmp_path, before).scheduling.max_losses == 7
    if after is None:
        path.unlink()
    else:
        path.write_text(after)
    with pytest.raises(InvalidInput, match=message):
        _reread(arguments, tmp_path, before)


def test_a_server_without_a_file_may_be_reloaded_and_may_get_one(tmp_path: Path):
    assert _reread(_arguments(), tmp_path, None).scheduling.max_losses == 3
    (tmp_path / "config.toml").write_text(TEXT)
    assert _reread(_arguments(), tmp_path, None).scheduling.max_losses == 7
