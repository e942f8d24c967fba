"""The playground in a browser, and what a person does with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from tests.support.browser import Browser
from tests.support.playground import Playground

__all__ = ["Page"]

_PATIENCE = 30.0


class Page(Browser):
    """A playground in chromium."""

    def __init__(self, driver: Chrome, folder: Path, playground: Playground) -> None:
        super().__init__(driver, folder)
        self.playground = playground

    def go(self, address: str = "") -> None:
        """Open an address, as if it were typed into an empty tab, and wait until it is drawn."""
        self.driver.get("about:blank")
        self.driver.get(f"{self.playground.url}{address}")
        self.wait("window.penstock && document.body.dataset.mode")
        self.quiet()

    def resize(self, size: tuple[int, int] | None) -> None:
        """A phone of this size, or the desktop."""
        if size is None:
            self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
            return
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": True}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def wait(self, expression: str) -> Any:
        """The value of an expression, as soon as it is true."""
        return self.until(lambda: self.ask(expression), expression)

    def until(self, happened: Callable[[], Any], what: str = "") -> Any:
        """The result of a function, as soon as it is true."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                if found := happened():
                    return found
            except StaleElementReferenceException:
                pass
            assert time.monotonic() < deadline, (
                f"it never became true: {what}; {self.ask('document.body.innerText')}"
            )
            time.sleep(0.03)

    def quiet(self) -> None:
        """Wait until no request is under way and everything is drawn."""
        self.wait("document.body.dataset.busy === '0'")
        self.settle()

    def text(self, selector: str) -> str:
        return self.driver.find_element(By.CSS_SELECTOR, selector).text

    def texts(self, selector: str) -> list[str]:
        return [element.text for element in self.driver.find_elements(By.CSS_SELECTOR, selector)]

    def tap(self, selector: str, nth: int = 0) -> None:
        """Click an element."""
        element = self.driver.find_elements(By.CSS_SELECTOR, selector)[nth]
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()
        self.quiet()

    def type(self, selector: str, value: object) -> None:
        """Replace the text of a field, and leave it."""
        element = self.driver.find_element(By.CSS_SELECTOR, selector)
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        element.send_keys(Keys.CONTROL, "a")
        element.send_keys(f"{value}\t")
        self.quiet()

    def choose(self, selector: str, value: str) -> None:
        """Choose from a list."""
        Select(self.driver.find_element(By.CSS_SELECTOR, selector)).select_by_value(value)
        self.quiet()

    def open_settings(self) -> None:
        """On a phone they are folded."""
        if not self.ask("document.getElementById('settings').open"):
            self.tap("#settings > summary")

    def reveal(self, step: int, panel: int = 0) -> tuple[int, int]:
        """The middle of a step, after it is scrolled into view."""
        self.driver.execute_script(
            "document.querySelectorAll('.plot')[arguments[0]].scrollIntoView({block: 'center'})", panel
        )
        self.settle()
        return self.place(step, panel)

    def drag(self, start: tuple[int, int], end: tuple[int, int], *, shift: bool = False) -> None:
        """Press at the start, move to the end and let go, with Shift held if asked."""
        if shift:
            ActionChains(self.driver).key_down(Keys.SHIFT).perform()
        actions = ActionBuilder(self.driver, duration=20)
        pointer: Any = actions.pointer_action  # selenium leaves its methods untyped
        pointer.move_to_location(*start).pointer_down().move_to_location((start[0] + end[0]) // 2, end[1])
        pointer.move_to_location(*end).pointer_up()
        actions.perform()
        if shift:
            ActionChains(self.driver).key_up(Keys.SHIFT).perform()
        self.quiet()
