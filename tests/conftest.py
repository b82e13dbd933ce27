"""For all tests. In CI the generated cases are the same in every run, so that a red run means a changed program; on a
developer's machine they differ each time, and a failure prints how to repeat it."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, print_blob=True)
settings.register_profile("here", print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
