"""The page in a real browser: Debian's packages chromium and chromium-driver, driven by selenium."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService, Keys
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.common.by import By

import penstock
from penstock import Costs, Placement, Schedule, Timeline
from penstock.view.html import html
from penstock.walk import Run
from penstock.why import critical_path

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="chromium is not installed")

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


def number_of(timeline: Timeline, action: str) -> int:
    """The number of a step among those that are drawn."""
    drawn = [e for e in timeline.events if not e.step.kind.is_communication]
    return [str(event.step) for event in drawn].index(action)


# --- loading ---------------------------------------------------------------------------------------


def test_it_loads_without_a_word_on_the_console_and_asks_the_network_for_nothing(browser: Browser) -> None:
    browser.requests()
    browser.show(ONE_F, ZBV)
    assert browser.noise() == []
    assert {url.split("://")[0] for url in browser.requests()} == {"file"}


def test_whatever_is_simulated_can_be_drawn(chromium: Browser) -> None:
    nothing = Run(np.empty(0), np.empty(0), None)
    empty = Timeline(Schedule([[], []], Placement.loop(2), 1), Costs(), nothing, lambda _: nothing)
    compute = penstock.simulate(penstock.build("zbv", ranks=2, microbatches=3))
    pairs = penstock.simulate(penstock.build("dualpipev", ranks=2, microbatches=4), Costs(overlap_factor=0.5))
    blocked = penstock.simulate(penstock.build("1f1b", ranks=2, microbatches=3), COSTS, blocking_receives=True)
    slow = penstock.simulate(
        penstock.lower(penstock.build("zbv", ranks=2, microbatches=3)),
        Costs(forward=1e-4, latency=2e-4, unshard=1e-3, reshard=1e-5, reduce_grad=3e-4, parameters=1e9),
    )
    for shown in ([], [empty], [empty, compute], [pairs], [blocked], [slow]):
        chromium.show(*shown)
        assert chromium.ask("penstock.frames") > 0
        for key in ("c", "+", Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ENTER, "0", "c", "d"):
            chromium.press(key)
        assert chromium.noise() == []


def test_something_is_drawn_on_every_canvas(browser: Browser) -> None:
    count = """[...document.querySelectorAll("canvas")].map((canvas) => {
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return new Set(new Uint32Array(data.buffer)).size;
    })"""
    axis, base, overlay, second, _ = browser.ask(count)
    assert min(axis, base, second) > 5
    assert overlay == 1
    browser.press("c")
    assert browser.ask(count)[2] > 5


def test_32_ranks_and_256_microbatches_are_drawn_in_less_than_two_seconds(chromium: Browser) -> None:
    built = penstock.build("interleaved-1f1b", ranks=32, microbatches=256, stages_per_rank=2)
    chromium.show(penstock.simulate(penstock.lower(built), COSTS))
    assert chromium.ask("penstock.dense") == [True]
    assert chromium.ask("penstock.firstDraw") < 2000
    for _ in range(10):
        chromium.press("+")
    assert chromium.ask("penstock.dense") == [False]
    assert chromium.noise() == []


# --- moving ----------------------------------------------------------------------------------------


def test_at_first_everything_is_visible(browser: Browser) -> None:
    assert browser.view == browser.fit
    start, end = browser.fit
    assert start == 0
    assert max(ONE_F.makespan, ZBV.makespan) <= end < 1.05 * max(ONE_F.makespan, ZBV.makespan)


def test_the_wheel_zooms_around_the_pointer(browser: Browser) -> None:
    step = number_of(ZBV, "3F2")
    place = browser.place(step, panel=1)
    browser.wheel(place, -400)
    start, end = browser.view
    assert end - start < 0.6 * browser.fit[1]
    assert abs(browser.place(step, panel=1)[0] - place[0]) <= 2
    browser.wheel(place, 4000)
    assert browser.view == pytest.approx(browser.fit)


def test_over_the_names_of_the_ranks_the_wheel_is_the_pages(browser: Browser) -> None:
    browser.wheel((20, browser.place(0)[1]), -400)
    assert browser.view == browser.fit


@pytest.mark.parametrize(
    "back", [lambda b: b.press("0"), lambda b: b.click("fit"), lambda b: b.point((900, 430), clicks=2)]
)
def test_fit_shows_everything_again(browser: Browser, back: Any) -> None:
    browser.press("+", "+")
    assert browser.view != browser.fit
    back(browser)
    assert browser.view == browser.fit


def test_two_fingers_zoom_around_their_middle(browser: Browser) -> None:
    step = number_of(ONE_F, "0B2")
    x, y = browser.place(step)
    for kind, apart in (("touchStart", 40), ("touchMove", 80), ("touchMove", 120), ("touchEnd", None)):
        fingers = [] if apart is None else [{"x": x - apart, "y": y}, {"x": x + apart, "y": y}]
        points = [{**finger, "id": i} for i, finger in enumerate(fingers)]
        browser.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    browser.settle()
    start, end = browser.view
    assert 0.3 < (end - start) / browser.fit[1] < 0.4
    assert abs(browser.place(step)[0] - x) <= 3


def test_dragging_pans_by_what_the_pointer_moves(browser: Browser) -> None:
    browser.press("+", "+")
    start, end = browser.view
    step = number_of(ONE_F, "0B2")
    x, y = browser.place(step)
    browser.point((x, y), drag_to=(x - 100, y))
    assert abs(browser.place(step)[0] - (x - 100)) <= 2
    after = browser.view
    assert after[0] > start
    assert after[1] - after[0] == pytest.approx(end - start)
    assert browser.ask("penstock.selected") is None


def test_keys_zoom_and_pan_within_what_there_is(browser: Browser) -> None:
    browser.press("+")
    start, end = browser.view
    assert end - start == pytest.approx(0.7 * browser.fit[1])
    browser.press(Keys.ARROW_RIGHT)
    assert browser.view == pytest.approx((start + 0.07 * browser.fit[1], end + 0.07 * browser.fit[1]))
    browser.press(*[Keys.ARROW_LEFT] * 20)
    assert browser.view[0] == 0
    browser.press("-", "-")
    assert browser.view == pytest.approx(browser.fit)


def test_two_timelines_share_the_axis(browser: Browser) -> None:
    for _ in range(2):
        one, two = (browser.ask(f"penstock.placeOf({panel}, 1).left") for panel in (0, 1))
        assert ONE_F.events[1].start == ZBV.events[1].start  # 0UNSHARD, then 0F0 in both
        assert one == two
        browser.press("+", "+", *[Keys.ARROW_LEFT] * 20)


# --- looking ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["0F0", "3F0", "1I4", "7W7"])
def test_hovering_shows_the_step(browser: Browser, action: str) -> None:
    step = number_of(ZBV, action)
    event = next(e for e in ZBV.events if str(e.step) == action)
    browser.point(browser.place(step, panel=1))
    assert browser.ask("penstock.hovered") == {"panel": 1, "step": step, "rank": event.rank, "action": action}
    assert browser.card.startswith(action)
    assert f"rank {event.rank}, {event.start:g} s to {event.end:g} s" in browser.card
    browser.point((5, 5))
    assert browser.ask("penstock.hovered") is None
    assert browser.card == ""


def test_the_card_says_what_a_step_needs_and_why_it_waited(browser: Browser) -> None:
    browser.point(browser.place(number_of(ONE_F, "0B0")))
    assert "needs the gradient of stage 1, microbatch 0 from 1B0, rank 1, there at 106 s" in browser.card
    assert "needs 0F0 of its own rank, done at 10 s" in browser.card
    assert "idle 66 s: waits for a gradient to be computed" in browser.card


def test_an_idle_stretch_says_why_it_is_there(browser: Browser) -> None:
    x, y = browser.place(number_of(ONE_F, "0B0"))
    browser.point((x - 80, y))
    assert browser.ask("penstock.hovered")["action"] is None
    assert "before 0B0" in browser.card
    assert "made by 1B0, rank 1" in browser.card


def test_the_chain_of_a_step_is_all_it_needs_and_its_direct_users(browser: Browser) -> None:
    browser.point(browser.place(number_of(ONE_F, "2B5")))
    lit = {"0F5", "1F5", "2F5", "3F5", "3B5", "2B5", "1B5"}
    assert set(browser.ask("penstock.lit")) == lit


def test_below_the_boxes_the_memory_is_told(browser: Browser) -> None:
    x, y = browser.place(number_of(ONE_F, "0B0"))
    browser.point((x, y + 30))
    assert browser.card.startswith("4 B")
    assert "peak 4 B" in browser.card


# --- keys and buttons ------------------------------------------------------------------------------


def action_selected(browser: Browser) -> str | None:
    selected = browser.ask("penstock.selected")
    return None if selected is None else str(selected["action"])


def test_a_click_selects_and_keys_go_on_from_there(browser: Browser) -> None:
    browser.point(browser.place(number_of(ONE_F, "1F1")), clicks=1)
    seen = [action_selected(browser)]
    for key in (Keys.ARROW_RIGHT, Keys.TAB, Keys.ARROW_LEFT, Keys.ARROW_DOWN, Keys.ARROW_UP, Keys.ARROW_UP):
        browser.press(key)
        seen.append(action_selected(browser))
    assert seen[:4] == ["1F1", "1F2", "1B0", "1F2"]
    assert [text and text[0] for text in seen[4:]] == ["2", "1", "0"]
    browser.press(Keys.ESCAPE)
    assert action_selected(browser) is None
    assert browser.card == ""


def test_without_a_mouse_a_panel_is_reached_by_tab_and_opened_by_enter(browser: Browser) -> None:
    label = "document.activeElement.getAttribute('aria-label') ?? ''"
    for _ in range(12):
        browser.press(Keys.TAB)
        if str(browser.ask(label)).startswith("1f1b"):
            break
    browser.press(Keys.ENTER)
    assert action_selected(browser) == "0F0"
    assert browser.card.startswith("0F0")
    browser.press(Keys.ESCAPE, Keys.TAB)
    assert str(browser.ask(label)).startswith("zbv")


def test_down_from_the_last_rank_leads_into_the_next_panel(browser: Browser) -> None:
    browser.point(browser.place(number_of(ONE_F, "3B7")), clicks=1)
    browser.press(Keys.ARROW_DOWN)
    selected = browser.ask("penstock.selected")
    assert (selected["panel"], selected["rank"]) == (1, 0)
    times = next(e for e in ZBV.events if str(e.step) == selected["action"])
    middle = next((e.start + e.end) / 2 for e in ONE_F.events if str(e.step) == "3B7")
    assert times.start - 10 <= middle <= times.end + 10


def test_a_selected_step_is_brought_into_view(browser: Browser) -> None:
    browser.press(*["+"] * 5, *[Keys.ARROW_LEFT] * 30)
    browser.point(browser.place(number_of(ONE_F, "0F0")), clicks=1)
    browser.press(*[Keys.ARROW_RIGHT] * 9)
    event = next(e for e in ONE_F.events if str(e.step) == action_selected(browser))
    start, end = browser.view
    assert start > 0
    assert start <= event.start
    assert event.end <= end


@pytest.mark.parametrize("toggle", [lambda b: b.press("c"), lambda b: b.click("critical")])
def test_the_critical_path_can_be_switched(browser: Browser, toggle: Any) -> None:
    pressed = "document.getElementById('critical').getAttribute('aria-pressed')"
    for on in (True, False):
        toggle(browser)
        assert browser.ask("penstock.critical") is on
        assert browser.ask(pressed) == str(on).lower()
    browser.point(browser.place(number_of(ONE_F, str(critical_path(ONE_F)[-3].step))))
    assert "on the critical path" in browser.card


@pytest.mark.parametrize("toggle", [lambda b: b.press("d"), lambda b: b.click("theme")])
def test_dark_and_light_can_be_switched(browser: Browser, toggle: Any) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    assert browser.ask("penstock.theme") == "light"
    light = browser.ask(ground)
    toggle(browser)
    assert browser.ask("penstock.theme") == "dark"
    assert browser.ask(ground) != light
    toggle(browser)
    assert browser.ask(ground) == light


def test_the_theme_is_at_first_the_readers(chromium: Browser) -> None:
    for wanted in ("dark", "light"):
        feature = {"name": "prefers-color-scheme", "value": wanted}
        chromium.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        chromium.show(ONE_F)
        assert chromium.ask("penstock.theme") == wanted


def test_a_question_mark_shows_the_keys(browser: Browser) -> None:
    browser.press("?")
    assert browser.ask("document.getElementById('keys').open")
    browser.press(Keys.ESCAPE)
    assert not browser.ask("document.getElementById('keys').open")


def test_at_400_pixels_nothing_is_wider_than_the_window(browser: Browser) -> None:
    size = {"width": 400, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.show(ONE_F, ZBV)
    assert browser.ask("document.documentElement.scrollWidth") == 400
    browser.point(browser.place(number_of(ZBV, "1F4"), panel=1))
    assert browser.card.startswith("1F4")
    assert browser.ask("document.getElementById('card').getBoundingClientRect().right") <= 400
    browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_what_the_page_tells_cannot_be_changed(browser: Browser) -> None:
    browser.driver.execute_script("penstock.view.start = 5; try { penstock.critical = true } catch {}")
    assert browser.view == browser.fit
    assert browser.ask("penstock.critical") is False
