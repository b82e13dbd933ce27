"""The decision log: bounded, in segments that can each be replayed, and without secrets."""

from __future__ import annotations

import asyncio
import importlib
import pickle
import zlib

import pytest

from builders import NOW_MS, a_job, a_job_spec, a_node, a_task
from hodei.backends.instant import InstantBackend
from hodei.control.snapshot import dump, load
from hodei.engine.plan import Plan
from hodei.model.config import ProfileConfig, SchedulingConfig
from hodei.model.errors import InvalidInput
from hodei.model.facts import BackendReported, EventNoted, JobSubmitted, Reconfigured
from hodei.runtime.decision_log import DecisionLog, closed_segments, state_path
from hodei.sim.replay import main as replay_main
from hodei.sim.replay import replay, replay_segments, segments_of
from hodei.sim.traces import open_workload
from hodei.wiring import make_controller
from unit.runtime.harness import RecordingStore, a_service, alive, until


def _instant():
    return InstantBackend("instant", [a_node("n1", 4, backend="instant")])


def test_a_decision_log_stays_within_its_size_and_each_segment_replays(tmp_path):
    path, max_bytes = tmp_path / "decisions.jsonl", 200_000

    async def main():
        log = DecisionLog(path, SchedulingConfig(), 0, max_bytes=max_bytes)
        async with alive(a_service(RecordingStore(), _instant(), decision_log=log)) as service:
            job = 0
            while not closed_segments(path) or closed_segments(path)[0].number < 3:
                await service.submit([a_job_spec(annotations={"note": "x" * 500}) for _ in range(5)])
                job += 5
                assert job < 5000, "the log is not pruned"
                await service.wait(job, 5000)
                number = 1 + max((segment.number for segment in closed_segments(path)), default=0)
                if number > 1:
                    await until(lambda number=number: state_path(path, number).exists())
                # At most one step beyond the limit, when the oldest segment is deleted.
                await until(lambda: sum(each.stat().st_size for each in tmp_path.iterdir()) <= max_bytes + 20_000)

    asyncio.run(main())
    segments = segments_of(path)
    assert segments[0].header.continues, "the first segments were not pruned"
    result = replay_segments(segments)
    assert (result.difference, result.skipped, result.files) == (None, [], len(segments))
    single = [replay(part.path) for part in segments]
    assert [each.difference for each in single] == [None] * len(segments)
    assert sum(each.steps for each in single) == result.steps
    assert {each.stat().st_mode & 0o777 for each in tmp_path.iterdir()} == {0o600}
    # A segment without its state is replayed with the one before it.
    state_path(path, segments[-1].header.segment).unlink()
    assert replay(path).steps == single[-1].steps + single[-2].steps
    # A segment is also a workload, with the nodes and jobs of its time.
    workload = open_workload(segments[0].path)
    assert workload.nodes
    assert len(workload.arrivals) > 10


def test_states_without_their_segment_are_deleted_and_an_empty_replay_is_an_error(tmp_path, capsys):
    path = tmp_path / "decisions.jsonl"
    for name in ("decisions.jsonl.3.state", "decisions.jsonl.2.state.part"):
        (tmp_path / name).write_bytes(b"late")
    others = ("decisions.jsonl.mine.state", "decisions.jsonl.8")
    for name in others:
        (tmp_path / name).write_bytes(b"")
    DecisionLog(path, SchedulingConfig(), 0).close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["decisions.jsonl", *sorted(others)]
    (tmp_path / "decisions.jsonl.8").unlink()
    path.write_bytes(path.read_bytes().replace(b'"hodei_decision_log":1', b'"hodei_decision_log":2'))
    assert replay_main(["--home", str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert "no file of the log can be replayed" in output.err
    assert "identical" not in output.out


def test_a_segment_without_a_state_is_deleted_with_the_one_it_continues(tmp_path):
    path = tmp_path / "decisions.jsonl"
    for number, first_line in (
        (1, b'{"hodei_decision_log":1,'),
        (2, b'{"hodei_decision_log":2,'),
        (3, b'{"hodei_decision_log":2,'),
    ):
        path.with_name(f"{path.name}.{number}").write_bytes(first_line + b"x" * 20_000)
    state_path(path, 3).write_bytes(b"state")
    DecisionLog(path, SchedulingConfig(), 0, max_bytes=60_000).close()
    assert [segment.number for segment in closed_segments(path)] == [3]


def test_a_segment_is_kept_until_the_next_one_has_its_state(tmp_path, monkeypatch):
    path = tmp_path / "decisions.jsonl"

    async def main() -> None:
        log = DecisionLog(path, SchedulingConfig(), 0, max_bytes=4000)
        never = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(log._state_worker, "run_now", lambda work: never)
        controller = make_controller(SchedulingConfig())
        for step in range(3):  # the server stops before the state of segment 2 is written
            controller.step(step)
            log.step(step, [EventNoted("noted", detail={"text": "x" * 3000})], Plan())
            log.begin_segment(controller)
        assert [segment.number for segment in closed_segments(path)] == [1, 2, 3]
        never.set_result(b"state")
        await until(lambda: [segment.number for segment in closed_segments(path)] == [])
        log.close()

    asyncio.run(main())


def test_a_segment_gets_its_state_even_if_a_backend_was_never_reached(tmp_path):
    path = tmp_path / "decisions.jsonl"

    async def main():
        log = DecisionLog(path, SchedulingConfig(), 0)
        controller = make_controller(SchedulingConfig())
        controller.step(NOW_MS, [BackendReported("farm", "backend farm is unreachable")])
        log.begin_segment(controller)
        await until(state_path(path, 2).exists)
        log.close()

    asyncio.run(main())


def test_no_segment_and_no_state_contains_values_of_variables_or_secret_options(tmp_path):
    path = tmp_path / "decisions.jsonl"
    config = SchedulingConfig(profiles={"mine": ProfileConfig(options={"x": {"api_token": "canary-option", "a": 1}})})
    job = a_job(1, tasks=[a_task(env={"PLAIN": "canary-value"})])
    log = DecisionLog(path, config, 0)
    log.step(NOW_MS, [JobSubmitted(job), Reconfigured(scheduling=config)], Plan())
    log.close()
    controller = make_controller(SchedulingConfig())
    controller.step(NOW_MS, [JobSubmitted(job)])
    for written in (path.read_bytes(), zlib.decompress(dump(controller))):
        assert b"PLAIN" in written
        assert b"canary" not in written
    assert b"api_token" in path.read_bytes()


def test_a_state_may_only_name_classes_of_a_scheduler():
    for call in (print, asyncio.run, "hodei.runtime.fork_worker:_run_child", "hodei.plugins.registry:build_profile"):

        class Evil:
            def __reduce__(self, call=call):
                module, _, name = call.partition(":") if isinstance(call, str) else ("", "", "")
                return (getattr(importlib.import_module(module), name) if module else call), ("x",)

        with pytest.raises(InvalidInput, match="not part of a controller"):
            load(zlib.compress(pickle.dumps(Evil())))
    with pytest.raises(InvalidInput, match="cannot be read"):
        load(b"nonsense")


def test_a_decision_log_continues_with_a_new_segment_after_a_full_disk(tmp_path, monkeypatch):
    path, full = tmp_path / "decisions.jsonl", open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - the log closes it

    async def main():
        log = DecisionLog(path, SchedulingConfig(), 0)
        async with alive(a_service(RecordingStore(), _instant(), decision_log=log)) as service:
            await service.submit([a_job_spec()])
            await service.wait(1, 5000)
            log._file.close()
            log._file = full
            await service.submit([a_job_spec()])
            await service.wait(2, 5000)
            assert not log.full
            monkeypatch.setattr("hodei.runtime.decision_log._RETRY_S", 0.0)
            await service.submit([a_job_spec()])
            await until(lambda: state_path(path, 2).exists())
            await service.submit([a_job_spec()])
            await service.wait(4, 5000)

    asyncio.run(main())
    segments = segments_of(path)
    assert [part.header.gap for part in segments] == [False, True]
    assert replay_segments(segments).difference is None
    assert replay(path).binds == 2  # the third segment starts after the gap


def test_a_segment_begins_after_the_steps_of_the_one_before_are_stored(tmp_path, monkeypatch):
    stored = []

    async def main():
        store, log = RecordingStore(), DecisionLog(tmp_path / "decisions.jsonl", SchedulingConfig(), 0)
        async with alive(a_service(store, _instant(), decision_log=log)) as service:
            begin = log.begin_segment

            def record_begin(controller):
                stored.append(store.job(1) is not None)
                log._segment_bytes = 1 << 30
                begin(controller)

            monkeypatch.setattr(log, "begin_segment", record_begin)
            await service.loop.commit([])  # no other step is in flight
            monkeypatch.setattr("hodei.runtime.decision_log._BUFFER", 1)
            log._segment_bytes = log._bytes + 1
            await service.submit([a_job_spec()])
            await service.submit([a_job_spec()])
            await until(lambda: stored)

    asyncio.run(main())
    assert stored == [True]
