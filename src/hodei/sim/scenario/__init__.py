"""Scenarios: a cluster, jobs and facts in a file, and what is expected of the scheduler. `form` reads the file, `reading`
makes values of it, `playing` lets the real controller live through it, `checking` compares, `telling` says what came out
and `golden` writes what happened back into the file.
"""

from __future__ import annotations
