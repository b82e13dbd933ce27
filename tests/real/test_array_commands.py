"""Arrays on a real server: a plain name or number means the whole array, in every command and in the client."""

from __future__ import annotations

import os
import pty
import subprocess

import pytest

from hodei.client import WaitTimedOut
from hodei.model.errors import InvalidInput
from real.installation import BIN, DEADLINE_S, Installation, until

pytestmark = pytest.mark.real

NODE = '[[nodes]]\nname = "a"\ncpu = "4"\n'
# Elements 1 and 4 of 6 fail unless the file is there.
SCRIPT = "echo out $HODEI_ARRAY_INDEX; echo err $HODEI_ARRAY_INDEX >&2; [ -e {fixed} ] || [ $((HODEI_ARRAY_INDEX % 3)) != 1 ]"


def submit_sweep(installation: Installation) -> None:
    script = SCRIPT.format(fixed=installation.home.parent / "fixed")
    installation.ok(
        "submit", "--name", "sweep", "--array", "6", "--cpu", "10m", "--memory", "1Mi", "--", "sh", "-c", script
    )


def test_a_plain_name_or_number_is_the_whole_array(installation: Installation) -> None:
    installation.configure(NODE).up()
    submit_sweep(installation)
    for reference in ("sweep", "1", "last", "sweep[]"):
        result = installation.hodei("wait", reference)
        assert result.code == 10, result
        assert "4 succeeded, 2 failed" in result.out + result.err
    # An element is addressed by its index or by its own number.
    assert [installation.hodei("wait", one).code for one in ("sweep[0]", "sweep[1]", "2", "3")] == [0, 10, 10, 0]
    assert installation.hodei("wait", "sweep", "-o", "json").json[0]["array"]["states"] == {"failed": 2, "succeeded": 4}
    shown = installation.ok("job", "show", "sweep").out
    assert "6, indices 0 to 5" in shown
    assert "4 succeeded, 2 failed" in shown
    why = installation.ok("why", "sweep").out
    assert "4 succeeded, 2 failed" in why
    assert "sweep[1]" in why
    assert installation.hodei("job", "history", "sweep").code == 2
    assert "sweep[0]" in installation.hodei("job", "history", "sweep").err
    assert "sweep" in installation.ok("job", "history", "1").out
    with installation.client() as client:
        assert client.wait("sweep")[0].state == "failed"
        assert client.wait([2, 3])[0].id == 2
        assert client.wait(1)[0].state == "succeeded"  # a number is one job
        assert client.job("sweep").job.array.states == {"failed": 2, "succeeded": 4}
        assert client.why("sweep").state == "failed"


def test_the_client_waits_for_and_cancels_an_array_as_one(installation: Installation) -> None:
    installation.configure(NODE).up()
    go = installation.home.parent / "go"
    script = f"until [ -e {go} ]; do sleep 0.05; done; exit $((HODEI_ARRAY_INDEX == 2))"
    document = {"name": "sweep", "array": 3, "cpu": "10m", "memory": "1Mi", "command": ["sh", "-c", script]}
    with installation.client() as client:
        handle = client.submit(document)
        with pytest.raises(WaitTimedOut):
            handle.wait(0.1)
        ids = client.submit_all([document, {"command": ["true"], "cpu": "10m", "memory": "1Mi"}])
        go.touch()
        assert handle.wait().state == "failed"
        assert handle.refresh().array.states == {"succeeded": 2, "failed": 1}
        assert [view.state for view in client.wait(ids)] == ["failed", "succeeded"]
        go.unlink()
        handle = client.submit(document)
        handle.cancel("enough")
        assert handle.wait().array.states == {"cancelled": 3}
    installation.ok("submit", "--name", "other", "--array", "3", "--cpu", "10m", "--", "sleep", "100")
    assert "array" in installation.ok("cancel", "other").out
    assert installation.hodei("wait", "other").code == 10
    assert installation.ok("jobs", "-a", "--name", "other", "-o", "json").json[0]["array"]["states"] == {"cancelled": 3}


def test_every_call_of_the_client_takes_a_reference_a_handle_or_a_view(installation: Installation) -> None:
    installation.configure(NODE).up()
    go = installation.home.parent / "go"
    small = {"cpu": "10m", "memory": "1Mi"}
    with installation.client() as client:
        handle = client.submit(name="arr", array=3, command=f"until [ -e {go} ]; do sleep 0.05; done; exit 1", **small)
        for whole in ("arr", "arr[]", handle, handle.id, client.job("arr"), client.array("arr"), 1, "arr[1]"):
            assert [view.array.index for view in client.elements(whole)] == [2, 1, 0], whole
        until(lambda: client.job("arr").job.array.states == {"running": 3}, "all elements run")
        for one in ("arr[1]", next(client.elements("arr", "running")), 2):
            assert client.graph(one).job in (2, 3)
            assert client.execute(one, ["echo", "hi"]).exit_code == 0
            assert client.log_times(one).marks is not None
            assert client.log_reader(one, follow=False).read() == b""
        for call in (client.suspend, client.resume, client.priority, client.graph, client.checkpoint, client.migrate):
            for whole in ("arr", handle, client.array("arr")):
                with pytest.raises(InvalidInput, match="this call takes one") as caught:
                    call(whole)
                assert "[0]" in caught.value.hint
        client.suspend("arr[1]")
        suspended = client.job("arr[1]").job
        assert suspended.suspend_requested or suspended.state == "held"
        client.resume("arr[1]")
        assert not client.job("arr[1]").job.suspend_requested
        go.touch()
        assert client.wait([handle, "arr[2]", client.job(1)], 60)[0].state == "failed"
        go.unlink()
        for again in ({"arrays": ["arr"]}, {"arrays": handle}, {"jobs": "arr"}, {"jobs": [client.job("arr")]}):
            client.requeue_all(**again, failed=True)
            assert client.job("arr").job.array.states.get("failed", 0) == 0, again
            go.touch()
            assert client.wait("arr", 60)[0].array.states == {"failed": 3}
            go.unlink()


def test_requeue_failed_runs_only_failed_elements_and_their_dependents(installation: Installation) -> None:
    installation.configure(NODE).up()
    submit_sweep(installation)
    small = ("--cpu", "10m", "--memory", "1Mi")
    installation.ok("submit", "--name", "report", "--after", "sweep", *small, "--", "echo", "report")
    installation.ok("submit", "--name", "mail", "--after", "report", *small, "--", "echo", "mail")
    assert installation.hodei("wait", "mail").code == 10
    assert installation.job(8).job.reason_code == "DEPENDENCY_NEVER_MET"
    (installation.home.parent / "fixed").touch()
    output = installation.ok("requeue", "--failed", "sweep").out
    assert "2 requeued" in output
    assert "report" in output
    assert "mail" in output
    for name in ("sweep", "report", "mail"):
        assert installation.hodei("wait", name).code == 0
    assert [installation.job(id).job.attempt for id in range(1, 9)] == [1, 2, 1, 1, 2, 1, 1, 1]
    assert "nothing" in installation.ok("requeue", "--failed", "sweep").err


def test_requeueing_succeeded_elements_needs_a_confirmation(installation: Installation) -> None:
    installation.configure(NODE).up()
    submit_sweep(installation)
    installation.hodei("wait", "sweep")
    refused = installation.hodei("requeue", "sweep")
    assert refused.code == 2
    assert "4 of its 6 elements have succeeded" in refused.err
    assert "--yes" in refused.err
    assert "--failed" in refused.err
    assert [installation.job(id).job.attempt for id in range(1, 7)] == [1] * 6

    # At a terminal the command prompts.
    for answer, attempts in ((b"n\n", [1] * 6), (b"y\n", [2] * 6)):
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            [BIN / "hodei", "requeue", "sweep"],
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=installation.env(),
        ) as command:
            os.write(ours, answer)
            command.communicate(timeout=DEADLINE_S)
        os.close(ours)
        os.close(theirs)
        until(
            lambda attempts=attempts: [installation.job(id).job.attempt for id in range(1, 7)] == attempts,
            f"{attempts} attempts",
        )
    installation.hodei("wait", "sweep")
    assert "array 1[] (sweep) requeued" in installation.ok("requeue", "--yes", "sweep").out
    until(
        lambda: [installation.job(id).job.attempt for id in range(1, 7)] == [3] * 6,
        "all elements have started a third time",
    )
    installation.hodei("wait", "sweep")
