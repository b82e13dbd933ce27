"""`hodei logs`: what a job writes, byte for byte."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable

import click

from hodei.cli.options import client, job_argument
from hodei.cli.output import note
from hodei.cli.refs import resolve_job


@click.command()
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
@click.option("--stderr", "stream", flag_value="stderr", help="What it writes to stderr.")
@click.option("--stdout", "stream", flag_value="stdout", default="stdout", help="What it writes to stdout [default].")
@click.option("--member", type=click.IntRange(0), default=0, show_default=True, help="Which member of a gang.")
@click.option("--attempt", type=click.IntRange(1), help="Which attempt [default: the newest].")
@click.option("--tail", type=click.IntRange(0), metavar="N", help="Begin with the last N lines.")
def logs(job: str, follow: bool, stream: str, member: int, attempt: int | None, tail: int | None) -> None:
    """Print what a job has written, or follow what it writes. Raw bytes: nothing is added or changed."""
    from hodei.client.logs import Pause

    with client() as server:
        id = resolve_job(server, job)
        reader = server.log_reader(id, stream=stream, member=member, attempt=attempt or 0, follow=follow)
        out, wrote, pause = sys.stdout.buffer, False, Pause()
        if tail is not None:
            out.writelines(last_lines(iter(reader.read, b""), tail))
            out.flush()
            wrote = True
        while not reader.at_end:
            data = reader.read()
            out.write(data)
            out.flush()
            wrote = wrote or bool(data)
            if not reader.at_end:
                time.sleep(pause.after(bool(data)))
        if not wrote:
            note(f"job {id} ({server.job(id).job.state}) has written nothing to {stream}")


def last_lines(chunks: Iterable[bytes], count: int) -> list[bytes]:
    """The last `count` lines, in bounded memory as long as lines are bounded."""
    lines: deque[bytes] = deque(maxlen=count)
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        lines.extend(line + b"\n" for line in whole)
    if rest:
        lines.append(rest)
    return list(lines)
