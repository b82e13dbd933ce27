"""Names of things.

A job is a small whole number, counted up by its installation, because people type it. A run is
`job.member.attempt`; it is unique within an installation, and whoever hands it to a system that
outlives the installation (an agent, a cluster) puts the installation's own id before it.
"""

from __future__ import annotations

JobId = int
RunId = str
NodeName = str


def run_id(job: JobId, member: int, attempt: int) -> RunId:
    return f"{job}.{member}.{attempt}"


def job_of(run: RunId) -> JobId:
    return int(run.split(".", 1)[0])
