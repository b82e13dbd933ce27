"""A real Chromium, controlled by the HTTP interface of chromedriver.

Without Chromium its tests are skipped, except in CI, where they fail.
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
_TIMEOUT_S = 60


def missing() -> str:
    """The name of a program that is not installed, or ""."""
    return next((name for name in PROGRAMS if shutil.which(name) is None), "")


class Browser:
    def __init__(self, address: str) -> None:
        self._address = address
        arguments = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")  # Chromium's sandbox does not work for root
        options = {"binary": shutil.which("chromium"), "args": arguments}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._request("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._address += f"/session/{session['sessionId']}"

    def open(self, page: Path) -> None:
        self._request("POST", "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a JavaScript function, and return its result."""
        return self._request("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: Literal["light", "dark"]) -> None:
        wanted = {"name": "prefers-color-scheme", "value": scheme}
        self._devtools("Emulation.setEmulatedMedia", {"features": [wanted]})

    def warnings(self) -> list[str]:
        """Warnings and errors on the console since the last call."""
        found = self._request("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in found if entry["level"] in ("WARNING", "SEVERE")]

    def screenshot(self) -> bytes:
        """A PNG of the visible part of the page."""
        return base64.b64decode(self._devtools("Page.captureScreenshot", {"format": "png"})["data"])

    def close(self) -> None:
        self._request("DELETE", "")

    def _devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._request("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)["value"]


@contextmanager
def browsing(log: Path) -> Iterator[Browser]:
    """A browser that is closed afterwards. chromedriver logs to `log`."""
    command = ["chromedriver", "--port=0", f"--log-path={log}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        assert driver.stdout is not None
        try:
            # "ChromeDriver was started successfully on port 41234."
            line = next((line for line in driver.stdout if "on port" in line and "success" in line), "")
            assert line, f"chromedriver did not start; see {log}"
            browser = Browser(f"http://127.0.0.1:{line.rsplit(' ', 1)[1].strip().rstrip('.')}")
            try:
                yield browser
            finally:
                browser.close()
        finally:
            driver.terminate()
            driver.wait(_TIMEOUT_S)
