"""Redfish and IPMI against real servers of these protocols."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from hodei.backends.bare_metal.bmc import Bmc, BmcError, make_bmc
from hodei.backends.bare_metal.settings import MachineSettings, Settings, machines_of
from ports import free_port
from real.installation import until
from real.metal.rack import USER, WATTS, Rack

pytestmark = pytest.mark.real


def settings_of(rack: Rack, name: str, **changes: Any) -> MachineSettings:
    found = MachineSettings(name, rack.addresses[name], user=USER, password_file=str(rack.password_file), **changes)
    (complete,) = machines_of("metal", Settings((found,)))
    return complete


def the_power_cycle(rack: Rack, name: str, bmc: Bmc) -> None:
    machine = rack.machines[name]
    machine.boots = False
    assert bmc.read().power == "off"
    bmc.power_on()
    until(lambda: bmc.read().power == "on", "it is on")
    bmc.power_on()
    assert (machine.is_on, machine.starts) == (True, 1)
    machine.ignores_shutdown = True
    bmc.shut_down()
    assert bmc.read().power == "on"
    machine.ignores_shutdown = False
    bmc.shut_down()
    until(lambda: bmc.read().power == "off", "it has shut down")
    bmc.power_on()
    until(lambda: bmc.read().power == "on", "it is on again")
    bmc.power_off()
    until(lambda: bmc.read().power == "off", "it is off")
    assert (machine.forced_off, machine.starts) == (1, 2)


def test_redfish_switches_a_machine_and_tells_its_inventory_progress_and_draw(rack: Rack) -> None:
    rack.add_redfish("m1", "m2")
    bmc = make_bmc(settings_of(rack, "m1", system="sys-m1"), 5)
    the_power_cycle(rack, "m1", bmc)
    off = bmc.read()
    assert off.capacity == {"cpu": 64_000, "memory": 512 * 2**30}
    assert (off.progress, off.watts) == ("", 0)
    rack.machines["m1"].power_on()
    on = bmc.read()
    assert (on.progress, on.watts) == ("its operating system boots", WATTS)
    assert make_bmc(settings_of(rack, "m2", system="sys-m2"), 5).read().power == "off"
    with pytest.raises(BmcError, match="System count is not exactly one"):
        make_bmc(settings_of(rack, "m1"), 5).read()


def test_ipmi_switches_a_machine(rack: Rack) -> None:
    rack.add_ipmi("m1")
    bmc = make_bmc(settings_of(rack, "m1", protocol="ipmi"), 5)
    until(lambda: answers(bmc), "ipmi_sim answers")
    the_power_cycle(rack, "m1", bmc)
    assert bmc.read().watts == 0


def answers(bmc: Bmc) -> bool:
    try:
        bmc.read()
    except BmcError:
        return False
    return True


def test_a_wrong_password_is_an_error_that_does_not_show_it(rack: Rack) -> None:
    rack.add_redfish("m1")
    rack.add_ipmi("m2")
    good = make_bmc(settings_of(rack, "m2", protocol="ipmi"), 5)
    until(lambda: answers(good), "ipmi_sim answers")
    assert make_bmc(settings_of(rack, "m1"), 5).read().power == "off"
    rack.password_file.write_text("not-the-password\n")
    for name, protocol in (("m1", "redfish"), ("m2", "ipmi")):
        bmc = make_bmc(settings_of(rack, name, protocol=protocol), 5)
        with pytest.raises(BmcError) as caught:
            bmc.power_on()
        assert "not-the-password" not in str(caught.value)
        assert not caught.value.in_doubt
    assert rack.all_off()


def test_the_certificate_of_a_bmc_is_verified(rack: Rack, tmp_path: Path) -> None:
    certificate, key = tmp_path / "bmc.pem", tmp_path / "bmc.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=bmc",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    rack.add_redfish("m1", tls=(certificate, key))
    with pytest.raises(BmcError, match="certificate verify failed"):
        make_bmc(settings_of(rack, "m1"), 5).read()
    assert make_bmc(settings_of(rack, "m1", ca=str(certificate)), 5).read().power == "off"
    assert make_bmc(settings_of(rack, "m1", insecure_tls=True), 5).read().power == "off"


@pytest.mark.parametrize("protocol", ["redfish", "ipmi"])
def test_a_bmc_that_does_not_answer_is_an_error_and_nothing_was_ordered(rack: Rack, protocol: str) -> None:
    rack.addresses["m1"] = f"127.0.0.1:{free_port()}"
    bmc = make_bmc(settings_of(rack, "m1", protocol=protocol), 2)
    with pytest.raises(BmcError) as caught:
        bmc.power_on()
    assert not caught.value.in_doubt


def test_a_password_that_cannot_be_read_is_named_by_its_file(rack: Rack) -> None:
    rack.add_redfish("m1")
    settings = structs.replace(settings_of(rack, "m1"), password_file="/does/not/exist")
    with pytest.raises(BmcError, match=r"password of its BMC cannot be read: /does/not/exist"):
        make_bmc(settings, 5).read()
