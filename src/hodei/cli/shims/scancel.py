"""`scancel`: jobs by number, or all that the filters mean."""

from __future__ import annotations

import sys

from hodei.cli.shims.finding import FILTERS, ids_of, jobs_of, rows, states_of, whole_array
from hodei.cli.shims.rows import Refused, read
from hodei.model.errors import Conflict, NotFound
from hodei.model.job import JOB_ENDED


def run(words: list[str]) -> int:
    given = read(words, f"{FILTERS} s/signal= f/full b/batch v/verbose Q/quiet")
    filtered = any(name in given for name in ("user", "me", "name", "state", "partition", "account"))
    if not given.rest and not filtered:
        raise Refused("error: No job identification provided")
    if given.get("signal", "TERM").upper().removeprefix("SIG") not in ("TERM", "KILL", "15", "9"):
        raise Refused(
            "error: no other signal than TERM can be sent here; next: hodei exec, or `checkpoint` in the job file"
        )
    from hodei.client import Client

    def say(text: str) -> None:
        if "quiet" not in given:
            sys.stderr.write(f"scancel: {text}\n")

    with Client() as client:
        if filtered:
            wanted = {row.job: row.view.id for row in rows(client, given, states_of(given, option="state"))}
            named = {id for text in given.rest for id in ids_of(client, text)}
            for job, id in wanted.items():
                if not named or id in named:
                    if "verbose" in given:
                        say(f"Terminating job {job}")
                    client.cancel(id)
            return 0
        for text in given.rest:
            try:
                if "verbose" in given:
                    say(f"Terminating job {text}")
                if array := whole_array(client, text):
                    client.cancel_array(array)
                    continue
                for view in jobs_of(client, text):
                    if view.state in JOB_ENDED:
                        raise Conflict("Job/step already completing or completed")
                    client.cancel(view.id)
            except NotFound:
                # As Slurm does: said, and no failure.
                say(f"error: Kill job error on job id {text}: Invalid job id specified")
            except Conflict:
                if "verbose" in given:
                    say(f"error: Kill job error on job id {text}: Job/step already completing or completed")
    return 0
