"""The browser for the tests of the HTML page."""

from __future__ import annotations

import pytest
from selenium.webdriver import Chrome

from tests.support.browser import ONE_F, ZBV, Browser


@pytest.fixture(scope="module")
def chromium(driver: Chrome, tmp_path_factory: pytest.TempPathFactory) -> Browser:
    return Browser(driver, tmp_path_factory.mktemp("pages"))


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    chromium.show(ONE_F, ZBV)
    return chromium
