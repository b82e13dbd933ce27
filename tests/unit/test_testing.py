"""`hodei.testing`: a server never imports it, and only its suites import pytest."""

from __future__ import annotations

import subprocess
import sys

CODE = {
    "a server": "import sys, hodei.server.__main__, hodei.wiring; sys.exit('hodei.testing' in sys.modules)",
    "builders": "import sys, hodei.testing, hodei.testing.builders; sys.exit('pytest' in sys.modules)",
}


def test_a_server_imports_no_suite_and_builders_need_no_pytest():
    for program, code in CODE.items():
        assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0, program


def test_every_public_name_exists():
    import hodei.testing

    for name in hodei.testing.__all__:
        assert getattr(hodei.testing, name).__name__ == name
