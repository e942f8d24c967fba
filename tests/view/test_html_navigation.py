"""Tests of the HTML page in a browser: drawing, zooming, panning, the shared time axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from selenium.webdriver import Keys

import penstock
from penstock import Costs, Placement, Schedule, Timeline
from tests.support.browser import BROWSER, COSTS, DRIVER, ONE_F, ZBV, Browser, number_of

pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="chromium is not installed")

# --- loading -------------------------------------------------------------------------------------


def test_it_loads_without_console_messages_and_network_requests(browser: Browser) -> None:
    browser.requests()
    browser.show(ONE_F, ZBV)
    assert browser.noise() == []
    assert {url.split("://")[0] for url in browser.requests()} == {"file"}


@pytest.mark.full
def test_every_family_can_be_drawn(chromium: Browser) -> None:
    nothing = np.empty(0)
    empty = Timeline(Schedule([[], []], Placement.loop(2), 1), Costs(), nothing, nothing)
    compute = penstock.simulate(penstock.build("zbv", ranks=2, microbatches=3))
    pairs = penstock.simulate(penstock.build("dualpipev", ranks=2, microbatches=4), Costs(overlap_factor=0.5))
    blocked = penstock.simulate(
        penstock.lower(penstock.build("1f1b", ranks=2, microbatches=3)), COSTS, blocking_receives=True
    )
    slow = penstock.simulate(
        penstock.lower(penstock.build("zbv", ranks=2, microbatches=3)),
        Costs(forward=1e-4, latency=2e-4, unshard=1e-3, reshard=1e-5, reduce_grad=3e-4, parameters=1e9),
    )
    graph = penstock.encoder_decoder((1, 1), 3, feeds=(0, 1, 2))
    fan = penstock.simulate(penstock.lower(penstock.build("1f1b", ranks=3, microbatches=2, graph=graph)), COSTS)
    for shown in ([], [empty], [empty, compute], [pairs], [blocked], [slow], [fan]):
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


@pytest.mark.full
def test_32_ranks_and_256_microbatches_are_drawn_in_less_than_two_cpu_seconds(chromium: Browser) -> None:
    built = penstock.build("interleaved-1f1b", ranks=32, microbatches=256, stages_per_rank=2)
    timeline = penstock.simulate(penstock.lower(built), COSTS)
    before = chromium.cpu_seconds()
    chromium.show(timeline)
    assert chromium.ask("penstock.dense") == [True]
    assert chromium.ask("penstock.firstDraw") > 0
    assert chromium.cpu_seconds() - before < 2
    for _ in range(10):
        chromium.press("+")
    assert chromium.ask("penstock.dense") == [False]
    assert chromium.noise() == []


# --- moving --------------------------------------------------------------------------------------


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


@pytest.mark.full
def test_the_wheel_over_rank_names_scrolls_the_page(browser: Browser) -> None:
    browser.wheel((20, browser.place(0)[1]), -400)
    assert browser.view == browser.fit


@pytest.mark.parametrize(
    "back",
    [lambda b: b.press("0"), lambda b: b.click("fit"), lambda b: b.point((900, b.place(0)[1]), clicks=2)],
)
@pytest.mark.full
def test_fit_shows_everything_again(browser: Browser, back: Any) -> None:
    browser.press("+", "+")
    assert browser.view != browser.fit
    back(browser)
    assert browser.view == browser.fit


@pytest.mark.full
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


@pytest.mark.full
def test_keys_zoom_and_pan_within_the_data(browser: Browser) -> None:
    browser.press("+")
    start, end = browser.view
    assert end - start == pytest.approx(0.7 * browser.fit[1])
    browser.press(Keys.ARROW_RIGHT)
    assert browser.view == pytest.approx((start + 0.07 * browser.fit[1], end + 0.07 * browser.fit[1]))
    browser.press(*[Keys.ARROW_LEFT] * 20)
    assert browser.view[0] == 0
    browser.press("-", "-")
    assert browser.view == pytest.approx(browser.fit)


@pytest.mark.full
def test_two_timelines_share_the_axis(browser: Browser) -> None:
    for _ in range(2):
        one, two = (browser.ask(f"penstock.placeOf({panel}, 1).left") for panel in (0, 1))
        assert ONE_F.events[1].start == ZBV.events[1].start  # 0UNSHARD, then 0F0 in both
        assert one == two
        browser.press("+", "+", *[Keys.ARROW_LEFT] * 20)
