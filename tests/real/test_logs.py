"""`hodei logs` on a real server: both streams, prefixed lines of arrays and gangs, and times."""

from __future__ import annotations

import re
import time

import pytest

from hodei.client.logs import LogOptions
from real.installation import DEADLINE_S, Installation, until

pytestmark = pytest.mark.real

NODE = '[[nodes]]\nname = "a"\ncpu = "4"\n'
SMALL = ("--cpu", "10m", "--memory", "1Mi")


def test_both_streams_are_shown_and_either_can_be_chosen(installation: Installation) -> None:
    installation.configure(NODE).up()
    id = installation.submit("sh", "-c", "echo one; echo two; echo bad >&2; echo worse >&2")
    installation.ended(id)
    result = installation.ok("logs", str(id))
    assert (result.out, result.err) == ("one\ntwo\n", "bad\nworse\n")
    result = installation.ok("logs", "--tail", "1", str(id))
    assert (result.out, result.err) == ("two\n", "worse\n")
    assert (installation.ok("logs", "--stdout", str(id)).out, installation.ok("logs", "--stdout", str(id)).err) == (
        "one\ntwo\n",
        "",
    )
    assert (installation.ok("logs", "--stderr", str(id)).out, installation.ok("logs", "--stderr", str(id)).err) == (
        "bad\nworse\n",
        "",
    )
    result = installation.ok("logs", "-f", str(id))
    assert (result.out, result.err) == ("one\ntwo\n", "bad\nworse\n")


def test_lines_of_arrays_and_gangs_have_their_source_and_time(installation: Installation) -> None:
    installation.configure(NODE).up()
    installation.ok(
        "submit", "--name", "sweep", "--array", "3", *SMALL, "--", "sh", "-c", "echo out; echo err >&2; printf end"
    )
    gang = installation.submit("sh", "-c", "echo rank $HODEI_RANK", name="trio", count=2)
    installation.ended(gang)
    installation.hodei("wait", "sweep")
    when = r"\d\d:\d\d:\d\d"
    for follow in ((), ("-f",)):
        result = installation.ok("logs", *follow, "sweep")
        assert sorted(re.sub(when, "T", result.out).splitlines()) == sorted(
            line for n in range(3) for line in (f"sweep[{n}] T | out", f"sweep[{n}] T | end")
        )
        assert sorted(re.sub(when, "T", result.err).splitlines()) == [f"sweep[{n}] T | err" for n in range(3)]
    assert re.sub(when, "T", installation.ok("logs", "sweep", "--tail", "1", "--stdout").out).count("| end") == 3
    assert installation.ok("logs", "sweep[1]").out == "out\nend"
    result = installation.ok("logs", "trio")
    assert sorted(re.sub(when, "T", result.out).splitlines()) == ["main[0] T | rank 0", "main[1] T | rank 1"]
    assert installation.ok("logs", "trio", "--member", "1").out == "rank 1\n"
    with installation.client() as client:
        assert sorted(client.logs("sweep"))[0] == b"sweep[0] | end"
        assert {line.source for line in client.log_lines("sweep")} == {"sweep[0]", "sweep[1]", "sweep[2]"}


def test_an_array_is_followed_from_before_it_starts_to_its_end(installation: Installation) -> None:
    installation.configure(NODE).up()
    go = installation.home.parent / "go"
    script = f"echo begins; until [ -e {go} ]; do sleep 0.05; done; echo ends"
    installation.ok("submit", "--name", "sweep", "--array", "4%2", *SMALL, "--", "sh", "-c", script)
    follower = installation.begin("logs", "-f", "sweep")
    assert follower.stdout is not None
    first = follower.stdout.readline()
    assert re.fullmatch(rb"sweep\[[01]\] \d\d:\d\d:\d\d \| begins\n", first)
    go.touch()
    out, _ = follower.communicate(timeout=DEADLINE_S)
    assert (first + out).count(b"begins") == (first + out).count(b"ends") == 4
    assert follower.returncode == 0


def test_output_from_before_since_is_omitted(installation: Installation) -> None:
    installation.configure(NODE).up()
    now, go = installation.home.parent / "now", installation.home.parent / "go"
    old = installation.submit("sh", "-c", "echo long over", name="old")
    id = installation.submit(
        "sh",
        "-c",
        f"echo early; until [ -e {now} ]; do sleep 0.05; done; echo late; until [ -e {go} ]; do sleep 0.05; done",
    )

    def marks() -> list[tuple[int, int]]:
        with installation.client() as client:
            return client.log_times(id).marks

    (early,) = until(marks, "the agent has seen the first line")
    assert early[0] == len("early\n")
    assert abs(early[1] - time.time() * 1000) < 60_000
    now.touch()
    until(lambda: len(marks()) == 2, "the agent has seen the second line")
    between = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(early[1] / 1000)) + f".{early[1] % 1000 + 1:03d}Z"
    assert installation.ok("logs", str(id), "--since", between).out == "late\n"
    assert installation.ok("logs", str(id), "--since", "1h").out == "early\nlate\n"
    result = installation.ok("logs", str(old), "--since", between)
    assert (result.out, result.err) == ("", f"job {old} (succeeded) has written nothing since then\n")
    assert installation.hodei("logs", str(id), "--since", "soon").code == 2
    with installation.client() as client:
        lines = [(line.text, line.at_ms) for line in client.log_lines(id, LogOptions(("stdout",)))]
        assert lines == [(b"early\n", early[1]), (b"late\n", marks()[1][1])]
    go.touch()
    installation.ended(id)
    assert installation.ok("logs", str(id), "--since", between).out == "late\n"


def test_the_last_lines_of_a_run_have_the_time_of_its_end(installation: Installation) -> None:
    installation.configure(NODE).up()
    go = installation.home.parent / "go"
    script = f"echo early; echo bad >&2; until [ -e {go} ]; do sleep 0.05; done; echo last; echo worse >&2"
    id = installation.submit("sh", "-c", script)
    with installation.client() as client:
        for stream in ("stdout", "stderr"):
            until(lambda stream=stream: client.log_times(id, stream=stream).marks, "the agent has seen the first line")
        go.touch()
        installation.ended(id)
        for stream, sizes in (("stdout", [6, 11]), ("stderr", [4, 10])):
            times = client.log_times(id, stream=stream)
            assert [offset for offset, _ in times.marks] == sizes
            last = list(client.log_lines(id, LogOptions((stream,))))[-1]
            assert last.at_ms == times.marks[-1][1] > times.marks[0][1]


def test_a_failed_job_is_reported_with_its_last_lines(installation: Installation) -> None:
    installation.configure(NODE).up()
    # The last lines on stderr are repeated, because other output has followed them.
    go = installation.home.parent / "go"
    script = f"for n in $(seq 20); do echo err $n >&2; done; until [ -e {go} ]; do sleep 0.05; done; echo later; exit 3"
    command = installation.begin("run", *SMALL, "--name", "bad", "--", "sh", "-c", script)
    assert command.stderr is not None
    assert b"err 20\n" in iter(command.stderr.readline, b"")
    go.touch()
    _, err = command.communicate(timeout=DEADLINE_S)
    assert command.returncode == 3
    tail = err.decode().partition("job 1 (bad) failed: ")[2].splitlines()
    assert tail[0].endswith("its last lines on stderr:")
    assert tail[1:11] == [f"  err {n}" for n in range(11, 21)]
    result = installation.hodei("run", *SMALL, "--", "sh", "-c", "echo oh no >&2; exit 4")
    assert (result.code, result.err.count("oh no")) == (4, 1)  # not repeated, because it was the last output
    assert "failed: " in result.err
    result = installation.hodei("submit", "--wait", *SMALL, "--", "sh", "-c", "echo only; exit 5")
    assert result.code == 10
    assert "its last lines on stdout:\n  only\n" in result.err
    element = ("sh", "-c", "echo part $HODEI_ARRAY_INDEX >&2; exit $((HODEI_ARRAY_INDEX == 1))")
    result = installation.hodei("run", *SMALL, "--name", "sweep", "--array", "3", "--", *element)
    assert result.code == 10
    assert "2 succeeded, 1 failed" in result.err
    assert "(sweep[1]) failed" in result.err
    assert result.err.rstrip().endswith("part 1\n  all of it: hodei logs '4[1]'")
    result = installation.hodei("submit", "--wait", *SMALL, "--name", "sweep", "--array", "3", "--", *element)
    assert result.code == 10
    assert "  part 1\n" in result.err
