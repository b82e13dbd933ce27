"""A real Chromium, moved through chromedriver's HTTP interface: no library is needed for the little that tests ask of it.

Where there is none the tests are skipped, except in CI: there it must be installed.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

PROGRAMS = ("chromium", "chromedriver")
_PATIENCE_S = 60


def missing() -> str:
    """Which program is not here; empty if both are."""
    return next((name for name in PROGRAMS if shutil.which(name) is None), "")


class Browser:
    def __init__(self, address: str) -> None:
        self._address = address
        arguments = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")  # Chromium's own does not work for root
        options = {"binary": shutil.which("chromium"), "args": arguments}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._address += f"/session/{made['sessionId']}"

    def open(self, page: Path) -> None:
        self._ask("POST", "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """What the JavaScript function body returns."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: Literal["light", "dark"]) -> None:
        wanted = {"name": "prefers-color-scheme", "value": scheme}
        self._devtools("Emulation.setEmulatedMedia", {"features": [wanted]})

    def complaints(self) -> list[str]:
        """What was written to the console since the last time, but for mere information."""
        found = self._ask("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in found if entry["level"] in ("WARNING", "SEVERE")]

    def picture(self, whole: bool = False) -> bytes:
        """A PNG of what is seen, or of the whole page."""
        given = {"format": "png", "captureBeyondViewport": whole}
        return base64.b64decode(self._devtools("Page.captureScreenshot", given)["data"])

    def close(self) -> None:
        self._ask("DELETE", "")

    def _devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
            return json.load(answer)["value"]


@contextmanager
def browsing(log: Path) -> Iterator[Browser]:
    """A browser of its own, gone afterwards. `log` gets what chromedriver says."""
    driver = subprocess.Popen(
        ["chromedriver", "--port=0", f"--log-path={log}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert driver.stdout is not None
        # The last words of the line are its port: "ChromeDriver was started successfully on port 41234."
        said = next((line for line in driver.stdout if "on port" in line and "success" in line), "")
        assert said, f"chromedriver did not start; see {log}"
        browser = Browser(f"http://127.0.0.1:{said.rsplit(' ', 1)[1].strip().rstrip('.')}")
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait(_PATIENCE_S)
