"""A server that switches machines on for its jobs, and off when they are idle."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hodei.api.views import NodeView
from real.installation import Installation, until, wait_for_file
from real.metal.rack import USER, WATTS, Rack

pytestmark = pytest.mark.real
CONFIG = """
[backends.local]
kind = "local"
enabled = false

[backends.metal]
kind = "bare_metal"
user = "{user}"
password_file = "{password_file}"
timeout = "2s"
shutdown_timeout = "{shutdown_timeout}"
startup = "1s"
away_after = "3s"
lost_after = "60s"

{machines}

[scheduling.capacity]
interval = "1s"
consolidate = 0

[scheduling.capacity.default]
idle = "{idle}"
boot_timeout = "{boot_timeout}"
tries = 1
pause = "10m"
"""


def up(rack: Rack, **changes: str) -> Installation:
    """A server with the machines of the rack, all of which have joined it and are off."""
    values = {"shutdown_timeout": "10s", "idle": "2s", "boot_timeout": "60s"} | changes
    machines = "\n".join(rack.tables)
    config = CONFIG.format(user=USER, password_file=rack.password_file, machines=machines, **values)
    installation = rack.installation.configure(config).up(port=rack.port)
    for machine in rack.machines.values():
        answer = installation.request(
            "POST", "/api/v1/agent/tokens", json.dumps({"backend": "metal", "node": machine.name}).encode()
        )
        machine.boot(answer.json["token"])
    found = until(lambda: known(rack), "all machines have joined")
    for machine in rack.machines.values():
        machine.power_off()
    assert {node.state for node in found} == {"potential"}
    return installation


def known(rack: Rack) -> list[NodeView]:
    found = list(nodes(rack).values())
    return found if all(node.capacity.get("cpu", "0") not in ("0", "64") for node in found) else []


def nodes(rack: Rack) -> dict[str, NodeView]:
    return {node.name: node for node in rack.installation.client().nodes()}


def events(rack: Rack, kind: str) -> list[str]:
    """The nodes of all events of this kind."""
    with rack.installation.client() as client:
        return [event.node for event in client.events() if event.kind == kind]


def submit(installation: Installation, proof: Path, then: str = "true", **fields: Any) -> int:
    script = f'echo "$HODEI_JOB_ID" >>{proof}; {then}'
    return installation.submit("sh", "-c", script, **{"restart": "never", **fields})


def check_once_and_off(rack: Rack, proof: Path, jobs: list[int]) -> None:
    """Every job succeeded and ran once; in the end all machines are off, and their nodes potential."""
    details = rack.installation.ended(*jobs)
    assert [detail.job.state for detail in details] == ["succeeded"] * len(jobs)
    assert all(len(detail.runs) == 1 for detail in details)
    assert Counter(map(int, proof.read_text().split())) == dict.fromkeys(jobs, 1)
    until(rack.all_off, "all machines are off")
    until(lambda: {node.state for node in nodes(rack).values()} == {"potential"}, "all nodes are potential")


def test_machines_are_switched_on_for_jobs_and_off_when_idle(rack: Rack, tmp_path: Path) -> None:
    rack.add_redfish("red-1", "red-2", rack="r7", price=0.5)
    rack.add_redfish("red-3", price=0.5)
    rack.add_ipmi("ipmi-1", price=0.5)
    rack.add_ipmi("ipmi-2", price=0.5)
    installation = up(rack)
    proof, go = tmp_path / "proof", tmp_path / "go"
    before = {name: machine.starts for name, machine in rack.machines.items()}
    jobs = [submit(installation, proof, wait_for_file(go)[2], cpu="500m") for _ in range(20)]
    until(lambda: all(machine.is_on for machine in rack.machines.values()), "all machines are on")
    watts = until(lambda: measured_watts(installation), "the power draw is measured")
    go.touch()
    check_once_and_off(rack, proof, jobs)
    assert watts == {WATTS}
    assert {name: machine.starts - before[name] for name, machine in rack.machines.items()} == dict.fromkeys(before, 1)
    assert not any(machine.forced_off for machine in rack.machines.values())
    assert nodes(rack)["red-1"].location["rack"] == "r7"
    assert len(events(rack, "node.ready")) == 5


def measured_watts(installation: Installation) -> set[int]:
    usage = installation.request("GET", "/api/v1/backends/metal/usage")
    assert usage.status == 200, usage.body
    found = {row["node"]: row["used"].get("watts") for row in usage.json["nodes"]}
    reds = {found.get(name) for name in ("red-1", "red-2", "red-3")}
    return reds if None not in reds else set()


def test_a_machine_that_never_boots_is_set_aside_with_the_reason(rack: Rack, tmp_path: Path) -> None:
    rack.add_redfish("broken", price=0.1, group="cheap")
    rack.add_redfish("good", price=0.9, group="dear")
    installation = up(rack, boot_timeout="4s", shutdown_timeout="1s")
    rack.machines["broken"].boots, rack.machines["broken"].ignores_shutdown = False, True
    proof = tmp_path / "proof"
    job = submit(installation, proof)
    until(lambda: rack.machines["broken"].is_on, "the cheaper machine is on")
    seen = until(lambda: starting(rack, "broken"), "the progress of the boot is shown")
    assert "its operating system boots; its agent has not connected yet" in seen
    check_once_and_off(rack, proof, [job])
    assert installation.job(job).runs[0].node == "good"
    assert events(rack, "node.boot_failed") == ["broken"]
    assert (rack.machines["broken"].starts, rack.machines["broken"].forced_off) == (1, 1)
    # It stays aside: the next job does not try it.
    more = submit(installation, proof)
    check_once_and_off(rack, proof, [job, more])
    assert rack.machines["broken"].starts == 1


def starting(rack: Rack, name: str) -> str:
    node = nodes(rack)[name]
    return node.reason if node.state == "starting" and "boots" in node.reason else ""


def test_a_bmc_that_goes_away_neither_stops_its_machine_nor_leaves_it_on(rack: Rack, tmp_path: Path) -> None:
    rack.add_redfish("red-1", group="a", price=0.1)
    rack.add_ipmi("ipmi-1", group="b", price=0.2)
    installation = up(rack)
    proof, go = tmp_path / "proof", tmp_path / "go"
    first = submit(installation, proof, wait_for_file(go)[2])
    installation.until_state(first, "running")
    rack.stop_bmc("red-1")
    # Its runs go on, also when the server is restarted meanwhile.
    installation.kill()
    installation.up(port=rack.port)
    until(lambda: nodes(rack)["red-1"].state == "ready", "the node is ready without its BMC")
    assert installation.state(first) == "running"
    go.touch()
    installation.ended(first)
    until(lambda: nodes(rack)["red-1"].state == "stopping", "the idle machine is to be stopped")
    assert rack.machines["red-1"].is_on
    # Another machine is used, and the one without a BMC is stopped as soon as that is back.
    second = submit(installation, proof)
    installation.ended(second)
    assert installation.job(second).runs[0].node == "ipmi-1"
    rack.start_bmc("red-1")
    check_once_and_off(rack, proof, [first, second])


def test_a_machine_whose_bmc_is_away_is_not_ordered(rack: Rack, tmp_path: Path) -> None:
    rack.add_redfish("red-1", group="a", price=0.1)
    rack.add_redfish("red-2", group="a", price=0.2)
    installation = up(rack)
    rack.stop_bmc("red-1")
    installation.kill()
    installation.up(port=rack.port)
    reason = until(lambda: nodes(rack)["red-1"].reason, "the node says why it cannot be started")
    assert "its BMC has been out of reach since" in reason
    proof = tmp_path / "proof"
    job = submit(installation, proof)
    check_once_and_off(rack, proof, [job])
    assert installation.job(job).runs[0].node == "red-2"


def test_a_server_killed_in_each_phase_leaves_no_machine_on_and_repeats_no_job(rack: Rack, tmp_path: Path) -> None:
    rack.add_redfish("red-1")
    rack.add_ipmi("ipmi-1")
    installation = up(rack, shutdown_timeout="1s")
    machines, proof, go = list(rack.machines.values()), tmp_path / "proof", tmp_path / "go"
    for machine in machines:
        machine.boots = False

    def restart() -> None:
        installation.kill()
        installation.up(port=rack.port)

    def both(state: str) -> bool:
        return all(node.state == state for node in nodes(rack).values())

    jobs = [
        submit(installation, proof, wait_for_file(go)[2], node_selector={"kubernetes.io/hostname": machine.name})
        for machine in machines
    ]
    until(lambda: len(events(rack, "node.ordered")) == 2, "the machines are ordered")
    restart()  # the orders may not have been sent
    until(lambda: all(machine.is_on for machine in machines), "the machines are on")
    restart()  # while they boot
    for machine in machines:
        machine.boot()
    for job in jobs:
        installation.until_state(job, "running")
    restart()  # while the jobs run
    until(lambda: both("ready"), "the agents are back")
    for machine in machines:
        machine.stuck = True
    go.touch()
    installation.ended(*jobs)
    until(lambda: both("stopping"), "the idle machines are to be stopped")
    restart()  # while they shut down
    until(lambda: both("stopping"), "they are still to be stopped")
    for machine in machines:
        machine.stuck = False
    check_once_and_off(rack, proof, jobs)
    assert [machine.starts for machine in machines] == [1, 1]
