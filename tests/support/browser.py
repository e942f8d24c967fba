"""A browser with the page of two timelines in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.common.by import By

import penstock
from penstock import Costs, Timeline
from penstock.view.html import html

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,900",
)
COSTS = Costs(forward=10, backward_input=11, backward_weight=9, latency=1)
ONE_F, ZBV = (
    penstock.simulate(penstock.lower(penstock.build(name, ranks=4, microbatches=8)), COSTS)
    for name in ("1f1b", "zbv")
)


def start_chromium(profile: Path) -> Chrome:
    """A browser with an empty profile that logs its console and its requests."""
    assert BROWSER is not None
    assert DRIVER is not None
    options = ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options, ChromeService(DRIVER))
    driver.set_script_timeout(20)
    return driver


class Browser:
    """A page in chromium, and what a person does with it."""

    def __init__(self, driver: Chrome, folder: Path) -> None:
        self.driver, self.folder = driver, folder

    def show(self, *timelines: Timeline) -> None:
        path = self.folder / "page.html"
        path.write_text(html(timelines), encoding="utf-8")
        self.noise()
        self.driver.get(path.as_uri())
        self.settle()

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
        )

    def ask(self, expression: str) -> Any:
        return self.driver.execute_script(f"return {expression}")

    @property
    def view(self) -> tuple[float, float]:
        view = self.ask("penstock.view")
        return view["start"], view["end"]

    @property
    def fit(self) -> tuple[float, float]:
        fit = self.ask("penstock.fit")
        return fit["start"], fit["end"]

    @property
    def card(self) -> str:
        return self.driver.find_element(By.ID, "card").text

    def log(self, name: str) -> list[dict[str, str]]:
        entries: list[dict[str, str]] = self.driver.get_log(name)  # type: ignore[no-untyped-call]  # selenium's
        return entries

    def noise(self) -> list[str]:
        return [entry["message"] for entry in self.log("browser")]

    def requests(self) -> list[str]:
        messages = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def cpu_seconds(self) -> float:
        """CPU time of the page's main thread so far, which does not depend on the load of the machine."""
        self.driver.execute_cdp_cmd("Performance.enable", {})
        metrics = self.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return float(next(metric["value"] for metric in metrics if metric["name"] == "ThreadTime"))

    def place(self, step: int, panel: int = 0) -> tuple[int, int]:
        """The middle of a step in the window."""
        box = self.ask(f"penstock.placeOf({panel}, {step})")
        return round((box["left"] + box["right"]) / 2), round((box["top"] + box["bottom"]) / 2)

    def point(self, place: tuple[int, int], *, drag_to: tuple[int, int] | None = None, clicks: int = 0) -> None:
        actions = ActionBuilder(self.driver, duration=0)
        pointer: Any = actions.pointer_action  # selenium leaves its methods untyped
        pointer.move_to_location(*place)
        for _ in range(clicks):
            pointer.pointer_down().pointer_up()
        if drag_to is not None:
            pointer.pointer_down().move_to_location(*drag_to).pointer_up()
        actions.perform()
        self.settle()

    def wheel(self, place: tuple[int, int], amount: int) -> None:
        ActionChains(self.driver, duration=0).scroll_from_origin(
            ScrollOrigin.from_viewport(*place), 0, amount
        ).perform()
        self.settle()

    def press(self, *keys: str) -> None:
        for key in keys:
            ActionChains(self.driver, duration=0).send_keys(key).perform()
        self.settle()

    def click(self, name: str) -> None:
        self.driver.find_element(By.ID, name).click()
        self.settle()


def number_of(timeline: Timeline, action: str) -> int:
    """The number of a step among those that are drawn."""
    drawn = [e for e in timeline.events if not e.step.kind.is_communication]
    return [str(event.step) for event in drawn].index(action)
