"""Identifiers.

A job id is a small integer, assigned in sequence by the installation, because people type it. A run id is
`job.member.attempt` and unique within an installation. A system that outlives the installation (an agent, a cluster)
prefixes it with the installation's own id.
"""

from __future__ import annotations

JobId = int
RunId = str
NodeName = str


def run_id(job: JobId, member: int, attempt: int) -> RunId:
    return f"{job}.{member}.{attempt}"


def job_of(run: RunId) -> JobId:
    return int(run.split(".", 1)[0])


def parse_run_id(run: RunId) -> tuple[JobId, int, int]:
    """Job, member and attempt; ValueError for an id of another form."""
    job, member, attempt = map(int, run.split("."))
    return job, member, attempt
