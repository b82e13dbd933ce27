"""The circuit breaker of a backend."""

from __future__ import annotations

from hodei.control.lifecycle.retry import Backoff, Circuit, CircuitPolicy

POLICY = CircuitPolicy(failures=3, pauses=Backoff(base_ms=5000, max_ms=20_000, jitter_milli=0))


def an_open_circuit(at_ms: int = 0) -> Circuit:
    circuit = Circuit(POLICY)
    for n in range(3):
        circuit.failed(at_ms + n, f"failure {n}")
    return circuit


def test_a_circuit_opens_at_the_third_consecutive_failure_and_reports_it_once():
    circuit = Circuit(POLICY)
    assert [circuit.failed(ms, "no") for ms in (10, 20)] == [False, False]
    assert not circuit.succeeded()
    assert [circuit.failed(ms, f"at {ms}") for ms in (30, 40, 50, 60)] == [False, False, True, False]
    assert (circuit.since_ms, circuit.text) == (30, "at 30")


def test_an_open_circuit_is_half_open_after_its_pause_and_closed_by_one_success():
    circuit = an_open_circuit()
    assert [circuit.state(ms) for ms in (2, 5001, 5002)] == ["open", "open", "half-open"]
    assert circuit.succeeded()
    assert circuit.state(5002) == "closed"


def test_each_failure_after_a_pause_doubles_the_next_pause_up_to_the_maximum():
    circuit, pauses, now = an_open_circuit(), [], 2
    for _ in range(4):
        pauses.append(circuit.until_ms - now)
        now = circuit.until_ms
        assert circuit.state(now) == "half-open"
        assert not circuit.failed(now, "still")
    assert pauses == [5000, 10_000, 20_000, 20_000]


def test_failures_during_a_pause_do_not_lengthen_it():
    circuit = an_open_circuit()
    before = circuit.until_ms
    circuit.failed(100, "another")
    assert circuit.until_ms == before


def test_the_next_check_is_early_after_a_failure_and_regular_otherwise():
    circuit = Circuit(POLICY)
    assert circuit.next_ms(0, 30_000) == 30_000
    circuit.failed(0, "no")
    assert circuit.next_ms(0, 30_000) == 5000
    assert an_open_circuit().next_ms(10, 30_000) == 5002
