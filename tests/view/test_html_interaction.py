"""Tests of the HTML page in a browser: hovering, selection, keyboard, buttons."""

from __future__ import annotations

from typing import Any

import pytest
from selenium.webdriver import Keys

import penstock
from penstock import Costs, Placement
from penstock.simulation.gaps import critical_path
from tests.support.browser import BROWSER, COSTS, DRIVER, ONE_F, ZBV, Browser, number_of
from tests.support.grids import small

pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="chromium is not installed")

# --- hovering ------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["0F0", "3F0", "1I4", "7W7"])
@small(lambda action: action in {"0F0", "7W7"})
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


def test_the_card_lists_the_inputs_of_a_step_and_why_it_waited(browser: Browser) -> None:
    browser.point(browser.place(number_of(ONE_F, "0B0")))
    assert "needs the gradient of stage 1, microbatch 0 from 1B0, rank 1, arrives at 106 s" in browser.card
    assert "needs 0F0 of the same rank, completed at 10 s" in browser.card
    assert "idle 66 s: waits for a gradient to be computed" in browser.card


@pytest.mark.full
def test_the_card_says_how_much_all_to_all_is_exposed(chromium: Browser) -> None:
    costs = Costs(forward_all_to_all=0.5)
    shown = penstock.simulate(penstock.build("1f1b", ranks=2, microbatches=2), costs)
    chromium.show(shown)
    chromium.point(chromium.place(number_of(shown, "0F0")))
    assert "all-to-all 0.5 units, 0.5 units exposed" in chromium.card
    chromium.point(chromium.place(number_of(shown, "0B0")))
    assert "all-to-all" not in chromium.card


def test_an_idle_gap_shows_its_cause(browser: Browser) -> None:
    x, y = browser.place(number_of(ONE_F, "0B0"))
    browser.point((x - 80, y))
    assert browser.ask("penstock.hovered")["action"] is None
    assert "before 0B0" in browser.card
    assert "computed by 1B0, rank 1" in browser.card


def test_hovering_highlights_transitive_inputs_and_direct_users(browser: Browser) -> None:
    browser.point(browser.place(number_of(ONE_F, "2B5")))
    lit = {"0F5", "1F5", "2F5", "3F5", "3B5", "2B5", "1B5"}
    assert set(browser.ask("penstock.highlighted")) == lit


@pytest.mark.full
def test_hovering_highlights_every_use_of_a_value_that_crossed_once(chromium: Browser) -> None:
    graph = penstock.StageGraph(3, ((0, 1), (0, 2)))
    built = penstock.build("gpipe", ranks=2, microbatches=1, graph=graph, placement=Placement((0, 1, 1)))
    fan = penstock.simulate(penstock.lower(built), COSTS)
    chromium.show(fan)
    chromium.point(chromium.place(number_of(fan, "0F0")))
    assert set(chromium.ask("penstock.highlighted")) == {"0F0", "1F0", "2F0", "0B0"}
    chromium.point(chromium.place(number_of(fan, "2F0")))
    assert set(chromium.ask("penstock.highlighted")) == {"0F0", "2F0", "2B0"}


def test_the_memory_strip_shows_the_memory_at_a_time(browser: Browser) -> None:
    x, y = browser.place(number_of(ONE_F, "0B0"))
    browser.point((x, y + 30))
    assert browser.card.startswith("4 activations")
    assert "peak 4 activations" in browser.card


# --- keys and buttons ----------------------------------------------------------------------------


def action_selected(browser: Browser) -> str | None:
    selected = browser.ask("penstock.selected")
    return None if selected is None else str(selected["action"])


def test_a_click_selects_and_keys_move_the_selection(browser: Browser) -> None:
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


@pytest.mark.full
def test_tab_focuses_a_panel_and_enter_selects_a_step(browser: Browser) -> None:
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


@pytest.mark.full
def test_down_from_the_last_rank_leads_into_the_next_panel(browser: Browser) -> None:
    browser.point(browser.place(number_of(ONE_F, "3B7")), clicks=1)
    browser.press(Keys.ARROW_DOWN)
    selected = browser.ask("penstock.selected")
    assert (selected["panel"], selected["rank"]) == (1, 0)
    times = next(e for e in ZBV.events if str(e.step) == selected["action"])
    middle = next((e.start + e.end) / 2 for e in ONE_F.events if str(e.step) == "3B7")
    assert times.start - 10 <= middle <= times.end + 10


@pytest.mark.full
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
@pytest.mark.full
def test_the_critical_path_can_be_switched(browser: Browser, toggle: Any) -> None:
    pressed = "document.getElementById('critical').getAttribute('aria-pressed')"
    for on in (True, False):
        toggle(browser)
        assert browser.ask("penstock.critical") is on
        assert browser.ask(pressed) == str(on).lower()
    browser.point(browser.place(number_of(ONE_F, str(critical_path(ONE_F)[-3].step))))
    assert "on the critical path" in browser.card


@pytest.mark.parametrize("toggle", [lambda b: b.press("d"), lambda b: b.click("theme")])
@pytest.mark.full
def test_dark_and_light_can_be_switched(browser: Browser, toggle: Any) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    assert browser.ask("penstock.theme") == "light"
    light = browser.ask(ground)
    toggle(browser)
    assert browser.ask("penstock.theme") == "dark"
    assert browser.ask(ground) != light
    toggle(browser)
    assert browser.ask(ground) == light


@pytest.mark.full
def test_the_initial_theme_is_that_of_the_system(chromium: Browser) -> None:
    for wanted in ("dark", "light"):
        feature = {"name": "prefers-color-scheme", "value": wanted}
        chromium.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        chromium.show(ONE_F)
        assert chromium.ask("penstock.theme") == wanted


@pytest.mark.full
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


def test_the_exposed_state_is_read_only(browser: Browser) -> None:
    browser.driver.execute_script("penstock.view.start = 5; try { penstock.critical = true } catch {}")
    assert browser.view == browser.fit
    assert browser.ask("penstock.critical") is False
