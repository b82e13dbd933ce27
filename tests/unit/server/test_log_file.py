"""The log file of the server is rotated, and gets all output of the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import logging, os, sys
from pathlib import Path
from hodei.server.home import LogFile
handler = LogFile(Path(sys.argv[1]), max_bytes=10_000, backup_count=3)
log = logging.getLogger("x")
log.addHandler(handler)
for number in range(6000):
    log.warning("line %d", number)
os.write(2, b"a traceback\\n")
"""


def test_the_log_is_bounded_and_stderr_is_in_the_newest_file(tmp_path: Path):
    path = tmp_path / "server.log"
    subprocess.run([sys.executable, "-c", _PROGRAM, str(path)], check=True, timeout=60)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["server.log", "server.log.1", "server.log.2", "server.log.3"]
    assert all(file.stat().st_size <= 10_100 for file in files)
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)
    assert "line 5999" in path.read_text()
    assert path.read_text().endswith("a traceback\n")
