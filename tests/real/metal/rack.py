"""Machines that are switched on and off by real BMCs: sushy-emulator for Redfish, ipmi_sim for IPMI.

A machine is an agent process that joined before: power on starts it, power off kills it and everything that it runs. Not
covered: PXE, POST times, and what single vendors' BMCs do differently.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agent_host import alive
from ports import free_port
from real.installation import DEADLINE_S, Installation, until

SUSHY_TOOLS = "sushy-tools-2.2.0"
USER, PASSWORD = "hodei", "s3cret-of-the-bmc"
WATTS = 184
EMULATOR = Path(__file__).with_name("emulator.py")


def cache_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("HODEI_CACHE") or base / "hodei")


def require_metal() -> Path:
    """The Python of the emulator. Skips without one; in CI that is a failure."""
    python = cache_folder() / SUSHY_TOOLS / "bin/python"
    missing = [name for name in ("ipmi_sim", "ipmitool") if shutil.which(name) is None]
    missing += [] if (cache_folder() / SUSHY_TOOLS / "ready").exists() else ["sushy-emulator"]
    if missing:
        text = f"{', '.join(missing)} not found; next: make metal"
        if os.environ.get("CI"):
            pytest.fail(text)
        pytest.skip(text)
    return python


class Machine:
    """`boots` false: it hangs after power on. `ignores_shutdown`: its operating system does. `stuck`: it cannot even be
    switched off. `starts`: how often it was switched on; `forced_off`: how often its power was cut."""

    def __init__(self, rack: Rack, name: str) -> None:
        self.rack, self.name = rack, name
        self.home = rack.home / f"machine-{name}"
        self.home.mkdir()
        self.boots, self.ignores_shutdown, self.stuck = True, False, False
        self.starts, self.forced_off = 0, 0
        self._lock = threading.Lock()
        self._agent: subprocess.Popen[bytes] | None = None

    @property
    def power_file(self) -> Path:
        return self.rack.power / self.name

    @property
    def is_on(self) -> bool:
        return self.power_file.exists()

    def order(self, state: str) -> None:
        if state in ("On", "ForceOn"):
            self.power_on()
        elif self.stuck:
            pass
        elif state == "ForceOff":
            self.forced_off += self.is_on
            self.power_off()
        elif state == "GracefulShutdown" and not self.ignores_shutdown:
            self.power_off()

    def power_on(self) -> None:
        with self._lock:
            if self.is_on:
                return
            self.starts += 1
            self.power_file.touch()
        if self.boots:
            self.boot()

    def boot(self, token: str = "") -> None:
        """Start the agent; with a token also while its BMC says that it is off."""
        with self._lock, (self.home / "agent.log").open("ab") as log:
            if self._agent is not None or not (self.is_on or token):
                return
            installation = self.rack.installation
            self._agent = subprocess.Popen(
                [sys.executable, "-m", "hodei.agent", "join", self.rack.url, "--home", str(self.home)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=installation.env({"HODEI_ENROL_TOKEN": token} if token else {}),
            )  # fmt: skip

    def power_off(self) -> None:
        with self._lock:
            if self._agent is not None:
                self._agent.kill()
                self._agent.wait(DEADLINE_S)
                self._agent = None
            for path in self.home.glob("runs/*/*/status"):
                for line in path.read_text(errors="replace").splitlines():
                    if " pid " in line and alive(pid := int(line.split()[-1])):
                        os.killpg(pid, signal.SIGKILL)
            self.power_file.unlink(missing_ok=True)


class Rack:
    """Some machines, their BMCs, and the notifier through which the BMCs switch them."""

    def __init__(self, installation: Installation, python: Path) -> None:
        self.installation, self._python = installation, python
        self.home = installation.home.parent / "rack"
        self.power = self.home / "power"
        self.power.mkdir(parents=True)
        self.password_file = self.home / "bmc-password"
        self.password_file.write_text(PASSWORD + "\n")
        self.machines: dict[str, Machine] = {}
        self.port = free_port()
        self._bmcs: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, list[str]] = {}
        self.tables: list[str] = []
        self.addresses: dict[str, str] = {}
        rack = self

        class Notifier(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                rack.machines[order["name"]].order(order["power_state"])
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._notifier = ThreadingHTTPServer(("127.0.0.1", 0), Notifier)
        self._notifier.daemon_threads = True
        self.notifier_url = f"http://127.0.0.1:{self._notifier.server_port}/"
        threading.Thread(target=self._notifier.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """Of the server, which keeps its port over restarts."""
        return f"http://127.0.0.1:{self.port}"

    def add_redfish(self, *names: str, tls: tuple[Path, Path] | None = None, **keys: object) -> None:
        """Machines with one emulator for all of them."""
        port, place = free_port(), self.home / f"redfish-{names[0]}"
        place.mkdir()
        systems = [{"uuid": f"sys-{name}", "name": name, "power_state": "Off", "external_notifier": True, "nics": []}
                   for name in names]  # fmt: skip
        (place / "htpasswd").write_text(self._htpasswd())
        lines = {
            "SUSHY_EMULATOR_LISTEN_IP": "127.0.0.1", "SUSHY_EMULATOR_LISTEN_PORT": port,
            "SUSHY_EMULATOR_STATE_DIR": str(place), "SUSHY_EMULATOR_FAKE_SYSTEMS": systems,
            "SUSHY_EMULATOR_AUTH_FILE": str(place / "htpasswd"), "EXTERNAL_NOTIFICATION_URL": self.notifier_url,
            "METAL_POWER": str(self.power), "METAL_WATTS": WATTS,
        }  # fmt: skip
        if tls is not None:
            lines |= {"SUSHY_EMULATOR_SSL_CERT": str(tls[0]), "SUSHY_EMULATOR_SSL_KEY": str(tls[1])}
        (place / "sushy.conf").write_text("".join(f"{key} = {value!r}\n" for key, value in lines.items()))
        command = [str(self._python), str(EMULATOR), str(place / "sushy.conf")]
        scheme = "https" if tls else "http"
        for name in names:
            system = f"sys-{name}" if len(names) > 1 else ""
            self._add(name, f"{scheme}://127.0.0.1:{port}", command, system=system, **keys)
        self._await_port(port)

    def add_ipmi(self, name: str, **keys: object) -> None:
        """A machine with its own ipmi_sim."""
        port, place = free_port(), self.home / f"ipmi-{name}"
        (place / "state").mkdir(parents=True)
        control = place / "chassis_control"
        control.write_text(
            f"#!/bin/sh\nfor last; do :; done\ncase \"$*\" in\n*'get power'*)\n"
            f"    if [ -e {self.power / name} ]; then echo power:1; else echo power:0; fi ;;\n"
            f"*'set power 1'*) {sys.executable} {place}/notify.py On ;;\n"
            f"*'set power 0'*) {sys.executable} {place}/notify.py ForceOff ;;\n"
            f"*'set shutdown 1'*) {sys.executable} {place}/notify.py GracefulShutdown ;;\nesac\n"
        )
        control.chmod(0o755)
        (place / "notify.py").write_text(
            "import json, sys, urllib.request\n"
            f"body = json.dumps({{'name': {name!r}, 'power_state': sys.argv[1]}}).encode()\n"
            f"urllib.request.urlopen(urllib.request.Request({self.notifier_url!r}, body, method='PUT'), timeout=30)\n"
        )
        (place / "lan.conf").write_text(
            f'name "{name}"\nset_working_mc 0x20\n  startlan 1\n    addr 127.0.0.1 {port}\n    priv_limit admin\n'
            "    allowed_auths_admin none md2 md5 straight\n    guid a123456789abcdefa123456789abcdef\n  endlan\n"
            f'  chassis_control "{control}"\n  startnow false\n'
            '  user 1 true "" "test" user 10 none md2 md5 straight\n'
            f'  user 2 true "{USER}" "{PASSWORD}" admin 10 none md2 md5 straight\n'
        )
        (place / "sim.emu").write_text(
            "mc_setbmc 0x20\nmc_add 0x20 0 no-device-sdrs 0x23 9 8 0x9f 0x1291 0xf02 persist_sdr\n"
            "sel_enable 0x20 1000 0x0a\nmc_enable 0x20\n"
        )
        command = [
            "ipmi_sim",
            "-c",
            str(place / "lan.conf"),
            "-f",
            str(place / "sim.emu"),
            "-s",
            str(place / "state"),
            "-n",
        ]
        self._add(name, f"127.0.0.1:{port}", command, protocol="ipmi", **keys)

    def _htpasswd(self) -> str:
        script = "import bcrypt, sys; print(bcrypt.hashpw(sys.argv[1].encode(), bcrypt.gensalt(4)).decode())"
        made = subprocess.run(
            [self._python, "-c", script, PASSWORD], capture_output=True, text=True, check=True, timeout=60
        )
        return f"{USER}:{made.stdout}"

    def _add(self, name: str, address: str, command: list[str], **keys: object) -> None:
        self.machines[name] = Machine(self, name)
        self.addresses[name] = address
        self._commands[name] = command
        shown = {"name": name, "address": address, **{key: value for key, value in keys.items() if value}}
        body = "\n".join(f"{key} = {json.dumps(value)}" for key, value in shown.items())
        self.tables.append(f"[[backends.metal.machines]]\n{body}\n")
        if self._key(name) not in self._bmcs:
            self.start_bmc(name)

    def _key(self, name: str) -> str:
        return " ".join(self._commands[name])

    def start_bmc(self, name: str) -> None:
        with (self.home / f"bmc-{name}.log").open("ab") as log:
            self._bmcs[self._key(name)] = subprocess.Popen(
                self._commands[name], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        if self.addresses[name].startswith("http"):
            self._await_port(int(self.addresses[name].rsplit(":", 1)[1]))

    def stop_bmc(self, name: str) -> None:
        process = self._bmcs[self._key(name)]
        process.kill()
        process.wait(DEADLINE_S)

    def _await_port(self, port: int) -> None:
        def is_open() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        until(is_open, f"port {port} is open")

    def all_off(self) -> bool:
        return not any(machine.is_on for machine in self.machines.values())

    def close(self) -> None:
        for machine in self.machines.values():
            machine.power_off()
        for process in self._bmcs.values():
            if process.poll() is None:
                process.kill()
            process.wait(DEADLINE_S)
        self._notifier.shutdown()
        self._notifier.server_close()
        for machine in self.machines.values():
            log = machine.home / "agent.log"
            assert not log.exists() or "Traceback" not in log.read_text(), log.read_text()
