"""The playground in a browser; every module has a playground of its own, so what a page stores ends with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from selenium.webdriver import Chrome

from tests.support.page import Page
from tests.support.playground import running


@pytest.fixture(scope="module")
def opened(driver: Chrome, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("downloads")
    settings = {"behavior": "allow", "downloadPath": str(folder)}
    driver.execute_cdp_cmd("Browser.setDownloadBehavior", settings)
    with running() as playground:
        yield Page(driver, folder, playground)
        driver.get("about:blank")  # a page would ask a server that is gone


@pytest.fixture
def page(opened: Page) -> Iterator[Page]:
    """A fresh page at desktop size; nothing it did may have been an error or a request to another host."""
    opened.resize(None)
    opened.noise()
    opened.requests()
    yield opened
    assert opened.noise() == []
    assert [
        url for url in opened.requests() if not url.startswith((opened.playground.url, "blob:", "data:"))
    ] == []


@pytest.fixture(params=["desktop", "phone"])
def any_size(page: Page, request: pytest.FixtureRequest) -> Page:
    """The page at the size of a desktop, and of a phone."""
    page.resize((390, 844) if request.param == "phone" else None)
    return page
