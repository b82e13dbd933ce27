"""What the machine offers, under limits put on it from outside."""

from __future__ import annotations

import os
import re

from hodei.backends import machine


def test_the_machine_offers_what_it_has(tmp_path):
    capacity = machine.capacity(tmp_path)
    assert 0 < capacity["cpu"] <= len(os.sched_getaffinity(0)) * 1000
    assert capacity["memory"] > 0
    assert capacity["ephemeral-storage"] > 0


def test_limits_of_groups_above_us_are_respected(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "own_groups", lambda: {"": "/a/b"})
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "a" / "b" / "cpu.max").write_text("max 100000\n")
    (tmp_path / "a" / "b" / "memory.max").write_text("1048576\n")
    capacity = machine.capacity(tmp_path, tmp_path)
    assert (capacity["cpu"], capacity["memory"]) == (500, 1048576)


def test_the_host_name_is_a_valid_name(monkeypatch):
    for given, expected in (("My_Host.local", "my-host.local"), ("---", "local"), ("a" * 80, "a" * 63)):
        monkeypatch.setattr(machine.socket, "gethostname", lambda given=given: given)
        assert machine.hostname() == expected
        assert re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", machine.hostname())
