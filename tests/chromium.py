"""A headless Chromium, for tests that open pages."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage")
_PHONE = {"deviceMetrics": {"width": 390, "height": 844, "pixelRatio": 2}}


def start_chromium(kind: str, profile: Path) -> Any:
    """Return a Chromium with an empty profile: "desktop", "phone" (390 px wide) or "dark".

    It skips the test, loudly, where there is none or it has no room.
    """
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: no page is opened")
    program, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed: the page is not tested in a browser")
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        pytest.skip("address space is limited (ulimit -v): chromium cannot start, the page is not tested in a browser")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*_FLAGS, f"--user-data-dir={profile}", "--window-size=1280,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    if kind == "phone":
        options.add_experimental_option("mobileEmulation", _PHONE)
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    if kind == "dark":
        feature = {"name": "prefers-color-scheme", "value": "dark"}
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    return chrome
