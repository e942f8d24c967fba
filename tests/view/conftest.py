"""The browser for the tests of the HTML page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.browser import ONE_F, ZBV, Browser, start_chromium


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    driver = start_chromium(tmp_path_factory.mktemp("profile"))
    yield Browser(driver, tmp_path_factory.mktemp("pages"))
    driver.quit()


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    chromium.show(ONE_F, ZBV)
    return chromium
