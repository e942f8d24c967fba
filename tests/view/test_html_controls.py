"""Tests of the HTML page in a browser: labels, legend, memory rows, microbatches, sizes, exports."""

from __future__ import annotations

import csv
import xml.etree.ElementTree as ET

import pytest
from selenium.webdriver.common.by import By

import penstock
from penstock import Costs, Timeline
from tests.support.browser import BROWSER, DRIVER, ONE_F, ZBV, Browser, number_of

pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="chromium is not installed")


def unit(family: str, ranks: int, microbatches: int) -> Timeline:
    return penstock.simulate(penstock.build(family, ranks=ranks, microbatches=microbatches))


def header(browser: Browser) -> str:
    return browser.driver.find_element(By.CSS_SELECTOR, ".panel header").text


def labels(browser: Browser, shown: Timeline, *actions: str) -> list[str]:
    return [browser.ask(f"penstock.labelOf(0, {number_of(shown, each)})") for each in actions]


def legend(browser: Browser) -> list[str]:
    return [each.text for each in browser.driver.find_elements(By.CSS_SELECTOR, "#legend li")]


def test_unit_costs_are_in_units_and_activations_and_real_ones_in_seconds_and_bytes(chromium: Browser) -> None:
    chromium.show(unit("1f1b", 2, 2))
    assert "makespan 9 units" in header(chromium).replace("\n", " ")
    assert "2 activations (rank 0)" in header(chromium)
    costs = Costs(forward=0.01, backward_input=0.01, backward_weight=0.01, activation=2**30)
    chromium.show(penstock.simulate(penstock.build("1f1b", ranks=2, microbatches=2), costs))
    assert "90 ms" in header(chromium)
    assert "2 GiB (rank 0)" in header(chromium)


@pytest.mark.full
def test_the_title_has_ranks_microbatches_and_stages_per_rank(chromium: Browser) -> None:
    chromium.show(unit("zbv", 4, 8))
    assert chromium.driver.title == "zbv: 4 ranks, 8 microbatches, 2 stages per rank"
    chromium.show(ONE_F, ZBV)
    assert chromium.driver.title == "1f1b, zbv: 4 ranks, 8 microbatches"
    assert "4 ranks, 8 microbatches, 1 stage per rank" in header(chromium)


@pytest.mark.full
def test_all_steps_of_a_panel_have_one_form_of_label(chromium: Browser) -> None:
    shown = unit("zbv", 4, 8)
    chromium.show(shown)
    assert labels(chromium, shown, "0F0", "7I7", "7W7") == ["0F0", "7I7", "7W7"]
    wide = unit("zbv", 4, 64)
    chromium.show(wide)
    assert chromium.ask("penstock.labels") == [None]
    chromium.press("+", "+", "+", "+", "+", "+")
    assert labels(chromium, wide, "0F33", "7I33", "7W33") in (["33"] * 3, ["0F33", "7I33", "7W33"])


def test_a_pair_has_both_parts_with_a_plus(chromium: Browser) -> None:
    shown = penstock.simulate(penstock.Schedule.parse("0F0 (0F1;0B0)OVERLAP_F_B 0B1"))
    chromium.show(shown)
    assert chromium.ask("penstock.labelOf(0, 1)") == "F1+B0"
    assert "overlapped pair" in legend(chromium)


def test_the_legend_explains_colours_shades_and_labels(chromium: Browser) -> None:
    chromium.show(unit("zbv", 4, 8))
    found = legend(chromium)
    assert found[:4] == [
        "F: forward",
        "I: input gradient",
        "W: weight gradient",
        "first to last stage of a rank",
    ]
    assert {"idle", "memory", "peak memory"} <= set(found)
    assert found[-1].startswith("number in a box: microbatch; 2F0: stage 2, forward, microbatch 0")


@pytest.mark.parametrize("toggle", [lambda b: b.press("m"), lambda b: b.click("memory")])
@pytest.mark.full
def test_memory_rows_can_be_hidden(browser: Browser, toggle: object) -> None:
    height = "document.querySelector('.plot').clientHeight"
    before = browser.ask(height)
    toggle(browser)  # type: ignore[operator]
    assert browser.ask("penstock.memory") is False
    assert browser.ask(height) < before
    assert "memory" not in legend(browser)
    toggle(browser)  # type: ignore[operator]
    assert browser.ask(height) == before


def test_a_click_highlights_the_microbatch_in_all_its_stages(browser: Browser) -> None:
    browser.point(browser.place(number_of(ONE_F, "2F5")), clicks=1)
    wanted = {f"{stage}{kind}5" for stage in range(4) for kind in "FB"}
    assert set(browser.ask("penstock.highlighted")) == wanted
    browser.point(browser.place(number_of(ONE_F, "0F0")))  # hovering another step keeps it
    assert set(browser.ask("penstock.highlighted")) == wanted


@pytest.mark.full
def test_32_ranks_fit_the_window(chromium: Browser) -> None:
    chromium.show(unit("1f1b", 32, 64))
    bottom = chromium.ask("document.querySelector('.plot').getBoundingClientRect().bottom")
    assert bottom <= chromium.ask("innerHeight")


def test_the_picture_is_exported_as_it_is_shown(chromium: Browser) -> None:
    shown = unit("zbv", 4, 8)
    chromium.show(shown)
    root = ET.fromstring(chromium.ask("penstock.exported('svg')"))  # noqa: S314 -- our own text
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"zbv", "rank 0", "0F0", "7W7", "W: weight gradient", "time, units"} <= set(texts)
    assert chromium.ask("penstock.exported('png')").startswith("data:image/png;base64,iVBOR")


def test_the_steps_are_exported_as_csv_with_their_times(chromium: Browser) -> None:
    shown = unit("1f1b", 2, 2)
    chromium.show(shown)
    rows = list(csv.DictReader(chromium.ask("penstock.exported('csv')").splitlines()))
    assert [row["action"] for row in rows] == [str(event.step) for event in shown.events]
    assert [(float(row["start_units"]), float(row["end_units"])) for row in rows] == [
        (event.start, event.end) for event in shown.events
    ]
