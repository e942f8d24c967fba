"""The browser for the tests of the HTML page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService

from tests.support.browser import BROWSER, DRIVER, FLAGS, ONE_F, ZBV, Browser


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert BROWSER is not None
    assert DRIVER is not None
    options = ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options, ChromeService(DRIVER))
    driver.set_script_timeout(20)
    yield Browser(driver, tmp_path_factory.mktemp("pages"))
    driver.quit()


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    chromium.show(ONE_F, ZBV)
    return chromium
