"""A headless Chromium that tests drive by the WebDriver protocol, where the machine has one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_PATIENCE_S = 120.0
_STARTS = 5
# No window, no sandbox (which refuses root), and none of the calls home that a browser makes.
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # what the protocol calls a found element


class Browser:
    """A session of a browser; elements are named by CSS selectors.

    Args:
        driver: URL of the driver.
        session: The session's id.
    """

    def __init__(self, driver: str, session: str) -> None:
        self._base = f"{driver}/session/{session}"

    def open(self, url: str) -> None:
        """Goes to a page, and waits until it is loaded."""
        _call("POST", f"{self._base}/url", {"url": url})

    def type(self, selector: str, text: str) -> None:
        """Replaces the text of a field, key by key."""
        element = self._find(selector)
        _call("POST", f"{element}/clear", {})
        _call("POST", f"{element}/value", {"text": text})

    def click(self, selector: str) -> None:
        """Clicks what must be in sight."""
        _call("POST", f"{self._find(selector)}/click", {})

    def run(self, script: str) -> Any:
        """The value that a script of the page returns."""
        return _call("POST", f"{self._base}/execute/sync", {"script": script, "args": []})

    def read(self, selector: str) -> list[str]:
        """The texts of all elements, as they are shown."""
        query = f"document.querySelectorAll({json.dumps(selector)})"
        return list(self.run(f"return [...{query}].map(found => found.innerText)"))

    def list_errors(self) -> list[str]:
        """What the page's scripts and loads complained of since the last call."""
        entries = _call("POST", f"{self._base}/se/log", {"type": "browser"})
        return [e["message"] for e in entries if e["level"] == "SEVERE"]

    def _find(self, selector: str) -> str:
        wanted = {"using": "css selector", "value": selector}
        found = _call("POST", f"{self._base}/element", wanted)
        return f"{self._base}/element/{found[_ELEMENT]}"


def wait_for(condition: Callable[[], Any]) -> Any:
    """Waits until something is true, and returns it."""
    end = time.monotonic() + _PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end, "what the page should show did not come"
        time.sleep(0.05)
    return found


@contextmanager
def run_browser(folder: Path) -> Iterator[Browser]:
    """Runs a browser while the block runs; skips the test where there is none.

    Args:
        folder: Empty; holds the browser's profile.
    """
    driver = os.environ.get("SLUICE_CHROMEDRIVER") or shutil.which("chromedriver")
    chromium = os.environ.get("SLUICE_CHROMIUM") or shutil.which("chromium")
    if not driver or not chromium:
        pytest.skip("no browser: neither SLUICE_CHROMEDRIVER and SLUICE_CHROMIUM nor the path has "
                    "chromedriver and chromium")  # fmt: skip
    process, port = _start_driver(driver, folder / "driver.log")
    try:
        url = f"http://127.0.0.1:{port}"
        flags = [*_FLAGS, f"--user-data-dir={folder / 'profile'}"]
        always = {
            "goog:chromeOptions": {"binary": chromium, "args": flags},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        made = _call("POST", f"{url}/session", {"capabilities": {"alwaysMatch": always}})
        yield Browser(url, made["sessionId"])
        _call("DELETE", f"{url}/session/{made['sessionId']}")
    finally:
        process.terminate()
        process.wait()


def _start_driver(driver: str, log: Path) -> tuple[subprocess.Popen[str], str]:
    """Starts a driver at a port that is free: it takes one for IPv4, which IPv6 may lack."""
    for _ in range(_STARTS):
        with log.open("a") as told:
            process = subprocess.Popen(
                [driver, "--port=0"], stdout=subprocess.PIPE, stderr=told, text=True
            )
        assert process.stdout is not None
        found = (re.search(r"started successfully on port (\d+)", line) for line in process.stdout)
        if port := next((match[1] for match in found if match), None):
            return process, port
        process.wait()
    raise AssertionError(log.read_text())


def _call(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{method} {url}: {error.read().decode()[:500]}") from None
