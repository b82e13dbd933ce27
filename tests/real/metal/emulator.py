"""sushy-emulator with machines of ours: run in its own venv, as `emulator.py CONFIG`. It imports nothing of the tests.

The stock fake driver changes the power after 1 to 11 random seconds, and has no processors and no memory. Here the power is
that of the machine itself (a file in METAL_POWER), and every order goes to the notifier. A chassis with a power meter and
the progress of the boot are added to what the emulator serves.
"""

import json
import os
import sys
from pathlib import Path

from sushy_tools.emulator import main
from sushy_tools.emulator.resources.systems.fakedriver import FakeDriver


class Machines(FakeDriver):
    def get_power_state(self, identity):
        return "On" if (Path(self._config["METAL_POWER"]) / self._get(identity)["name"]).exists() else "Off"

    def set_power_state(self, identity, state):
        system = self._get(identity)
        self._send_external_notification({"name": system["name"], "power_state": state})

    def get_total_cpus(self, identity):
        return 64

    def get_total_memory(self, identity):
        return 512


def with_more(response):
    path = main.flask.request.path.rstrip("/")
    parts = path.split("/")
    if response.status_code != 200 or len(parts) != 5:
        return response
    if parts[3] == "Chassis":
        body = json.loads(response.data)
        body["EnvironmentMetrics"] = {"@odata.id": f"{path}/EnvironmentMetrics"}
        response.data = json.dumps(body)
    elif parts[3] == "Systems":
        body = json.loads(response.data)
        body["BootProgress"] = {"LastState": "OSBootStarted" if body["PowerState"] == "On" else "None"}
        response.data = json.dumps(body)
    return response


main.fakedriver.FakeDriver = Machines
main.app.after_request(with_more)
main.app.add_url_rule(
    "/redfish/v1/Chassis/<identity>/EnvironmentMetrics",
    "metrics",
    lambda identity: main.flask.jsonify(
        {"Id": "EnvironmentMetrics", "PowerWatts": {"Reading": main.app.config["METAL_WATTS"]}}
    ),
)
if __name__ == "__main__":
    os.environ.pop("SUSHY_EMULATOR_CONFIG", None)
    sys.argv = ["sushy-emulator", "--fake", "--config", sys.argv[1]]
    sys.exit(main.main())
