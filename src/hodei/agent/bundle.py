"""The agent as one file, for any host with Python 3.11: a zip archive that Python runs. The same sources give the same bytes."""

from __future__ import annotations

import io
import os
import sys
import zipfile
from pathlib import Path

_MODULES = ("supervision.py", "process.py")
_STAMP = (1980, 1, 1, 0, 0, 0)
_MAIN = """\
import sys

if sys.version_info < (3, 11):
    sys.exit("the agent needs Python 3.11 or newer, this is %d.%d" % sys.version_info[:2])
from hodei.agent.__main__ import main

words = sys.argv[1:]
sys.exit(main(words if words[:1] == ["join"] else ["join", *words]))
"""


def bundle() -> bytes:
    package = Path(__file__).parent.parent
    version: str = sys.modules["hodei"].__version__
    files = {"__main__.py": _MAIN, "hodei/__init__.py": f'__version__ = "{version}"\n'}
    files |= {f"hodei/{name}": (package / name).read_text() for name in _MODULES}
    files |= {f"hodei/agent/{path.name}": path.read_text() for path in sorted((package / "agent").glob("*.py"))}
    out = io.BytesIO()
    out.write(b"#!/usr/bin/env python3\n")
    with zipfile.ZipFile(out, "a", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name, _STAMP), text, zipfile.ZIP_DEFLATED)
    return out.getvalue()


def write_bundle(path: Path) -> int:
    """The number of bytes. The file is replaced at once, and executable."""
    data, fresh = bundle(), path.with_name(f"{path.name}.new")
    fresh.write_bytes(data)
    fresh.chmod(0o755)
    os.replace(fresh, path)
    return len(data)
