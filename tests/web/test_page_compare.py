"""Promises of the page, by clicking and typing: build and compare, understand, take away, share."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

import penstock
from tests.support.browser import BROWSER, DRIVER
from tests.support.grids import small
from tests.support.page import Page

pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="chromium is not installed")


def has_content(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


def makespans(page: Page) -> list[str]:
    return page.texts("#table tbody td:nth-child(2)")


@small(lambda any_size: any_size == "desktop")
def test_schedules_are_drawn_on_one_axis_beside_their_table(any_size: Page) -> None:
    page = any_size
    page.go()
    assert page.texts(".panel h2") == ["1f1b", "zb-h1", "zbv"]
    assert [text.split()[0] for text in makespans(page)] == ["33", "27", "25.5"]
    assert page.ask("document.documentElement.scrollWidth") <= page.ask("innerWidth")


@pytest.mark.full
def test_sizes_families_and_costs_change_the_answer(any_size: Page) -> None:
    page = any_size
    page.go()
    page.open_settings()
    page.type("#ranks", 2)
    page.type("#microbatches", 4)
    page.choose("#add", "gpipe")
    page.tap(".chosen li:first-child button[aria-label^=Remove]")
    page.type("#latency_seconds", 0.5)
    assert page.texts(".panel h2") == ["zb-h1", "zbv", "gpipe"]
    assert makespans(page)[2].startswith("16 units")
    address = page.ask("location.hash")
    for part in ("ranks=2", "microbatches=4", "latency_seconds=0.5", "schedules=zb-h1,zbv,gpipe"):
        assert part in address


@pytest.mark.full
def test_a_bar_is_dragged_to_make_a_stage_heavier(page: Page) -> None:
    page.go("#schedules=1f1b&microbatches=4")
    before = makespans(page)
    page.driver.execute_script("document.querySelector('.weights').scrollIntoView({block: 'center'})")
    box = page.ask("document.querySelector('.weight:nth-child(2)').getBoundingClientRect().toJSON()")
    x = round(box["x"] + box["width"] / 2)
    page.drag((x, round(box["bottom"] - 10)), (x, round(box["top"] + box["height"] * 0.4)))
    assert makespans(page) != before
    assert "weights=1,2.5,1,1" in page.ask("location.hash")


@pytest.mark.full
def test_the_memory_limit_and_jitter_are_shown(page: Page) -> None:
    page.go("#schedules=1f1b,gpipe")
    page.type("#limit", "4")
    page.type("#jitter", "0.1")
    page.wait("document.querySelector('#table tbody tr td:nth-child(8)')?.textContent.includes(' units')")
    assert "over the limit" in page.texts("#table tbody tr")[1]
    assert "over the limit" not in page.texts("#table tbody tr")[0]


@pytest.mark.full
def test_a_link_shows_the_same_and_back_and_forward_work(page: Page) -> None:
    page.go("#ranks=3&schedules=1f1b")
    page.type("#microbatches", 5)
    page.type("#ranks", 2)
    shown, address = makespans(page), page.ask("location.hash")
    page.driver.back()
    page.until(lambda: makespans(page) != shown)
    page.driver.forward()
    page.until(lambda: makespans(page) == shown)
    page.go(address)
    assert makespans(page) == shown


def test_a_family_that_cannot_be_built_says_why(page: Page) -> None:
    page.go("#schedules=1f1b,interleaved-1f1b;group=99,nonsense")
    failed = page.texts("#table .failed")
    assert "group of interleaved-1f1b must be" in failed[0]
    assert "unknown family" in failed[1]
    assert page.texts(".panel h2") == ["1f1b"]


@small(lambda any_size: any_size == "desktop")
def test_a_gap_is_explained_in_a_sentence(any_size: Page) -> None:
    page = any_size
    page.go("#schedules=1f1b&ranks=2&microbatches=2")
    _, y = page.reveal(1)
    right = page.ask("penstock.placeOf(0, 1)")["right"]
    page.point((round(right) + 12, y), clicks=1)
    text = page.text("#explain")
    assert "Rank 0 is idle for 2 units before 0B0" in text
    assert "it waits for a gradient" in text
    assert "1B0 on rank 1 must end earlier" in text


@pytest.mark.full
def test_critical_paths_are_compared(page: Page) -> None:
    page.go("#schedules=1f1b,zb-h1")
    page.tap("#critical")
    assert page.ask("penstock.critical") is True
    text = page.text("section[aria-label='Critical paths']")
    assert "The path of zb-h1 has" in text
    assert "less B" in text


@pytest.mark.full
def test_what_if_a_rank_is_slow(any_size: Page) -> None:
    page = any_size
    page.go("#schedules=1f1b")
    page.tap("#whatif-slow-rank")
    assert "whatif=slow-rank:2:1.5" in page.ask("location.hash")
    assert "If rank 2 takes 1.5 times as long: 1f1b 33 units →" in page.text("section[aria-label='What if']")
    page.tap("#whatif-slow-rank")
    assert "whatif" not in page.ask("location.hash")


WHAT_IF = "section[aria-label='What if']"


@pytest.mark.full
def test_what_if_a_link_is_slow(page: Page) -> None:
    page.go("#schedules=1f1b&latency_seconds=0.5")
    page.tap("#whatif-slow-link")
    page.type("#whatif-index", 1)
    page.type("#whatif-factor", 4)
    assert "whatif=slow-link:1:4" in page.ask("location.hash")
    schedule = penstock.build("1f1b", ranks=4, microbatches=8)
    before, after = (
        penstock.simulate(schedule, penstock.Costs(latency=each)).makespan for each in (0.5, (0.5, 2.0, 0.5))
    )
    assert after > before
    told = f"the link from stage 1 to the next takes 4 times as long: 1f1b {before:g} units → {after:g} units."
    assert f"If {told}" in page.text(WHAT_IF)
    assert makespans(page)[0].startswith(f"{after:g} units")
    page.type("#whatif-index", 3)  # four stages have three links
    assert "it has links 0 to 2 (given link 3)" in page.text("#table .failed")


@pytest.mark.full
def test_what_if_microbatches_are_larger(page: Page) -> None:
    page.go("#schedules=1f1b")
    page.tap("#whatif-larger-microbatch")
    told = "If microbatches are 2 times as large, and so many fewer: 1f1b 33 units → 42 units."
    assert told in page.text(WHAT_IF)
    assert "m=4" in page.text("#table tbody th")
    page.type("#whatif-factor", 4)
    assert "1f1b 33 units → 60 units." in page.text(WHAT_IF)


@pytest.mark.full
def test_what_if_there_is_more_memory(page: Page) -> None:
    page.go("#schedules=gpipe,1f1b")
    page.tap("#whatif-memory")
    assert "If 2 times the memory: set a memory limit first." in page.text(WHAT_IF)
    page.type("#limit", 3)
    told = "If 2 times the memory: the fastest that fits is 1f1b (33 units); it was none of these."
    assert told in page.text(WHAT_IF)
    assert ["over the limit" in row for row in page.texts("#table tbody tr")] == [True, False]
    page.type("#whatif-factor", 3)
    assert "over the limit" not in page.text("#table")


@pytest.mark.full
def test_a_bar_is_changed_with_the_keyboard(page: Page) -> None:
    page.go("#schedules=1f1b&microbatches=4")
    before = makespans(page)
    page.driver.execute_script("document.querySelector('.weight:nth-child(3)').focus()")
    page.press(Keys.ARROW_UP, Keys.PAGE_UP)
    page.until(lambda: "weights=1,1,2.25,1" in page.ask("location.hash"))
    page.quiet()
    assert makespans(page) != before
    page.press(Keys.HOME)
    page.until(lambda: "weights" not in page.ask("location.hash"))
    page.quiet()
    assert makespans(page) == before


@pytest.mark.full
def test_a_point_of_the_pareto_chart_draws_its_schedule(any_size: Page) -> None:
    page = any_size
    page.go("#schedules=1f1b&pareto=1")
    page.wait("document.querySelectorAll('.dot').length > 10")
    page.tap(".dot[aria-label^='v-half:'] circle:not(.touch)")
    assert page.texts(".panel h2") == ["1f1b", "v-half"]


@pytest.mark.full
def test_files_and_lines_are_taken_away(any_size: Page) -> None:
    page = any_size
    page.go("#schedules=zb-h1&latency_seconds=0.25")
    page.tap("#table .actions button:nth-child(2)")
    page.wait("document.querySelectorAll('#take pre').length > 2")
    shown = page.texts("#take pre")
    assert shown[0] == "penstock simulate zb-h1 -p 4 -m 8 --costs costs.toml"
    assert "latency_seconds = 0.25" in shown[1]
    assert "penstock.build('zb-h1', ranks=4, microbatches=8)" in shown[2]
    assert "--parallelism.pipeline_parallel_degree=4" in shown[3]
    for name in ("csv", "json", "svg", "png", "html", "trace"):
        page.tap(f"#take-{name}")
        page.wait("document.getElementById('take-status').textContent.includes(' bytes')")
        ending = {"trace": "trace.json"}.get(name, name)
        file = Path(page.folder) / f"zb-h1-p4-m8.{ending}"
        page.until(partial(has_content, file))
        file.unlink()


@pytest.mark.full
def test_the_main_path_needs_only_a_keyboard(page: Page) -> None:
    page.go("#schedules=1f1b&ranks=2&microbatches=3")
    page.press(Keys.TAB, Keys.ENTER)  # skip to the schedules
    for _ in range(40):
        page.press(Keys.TAB)
        if page.ask("document.activeElement.classList.contains('plot')"):
            break
    page.press(Keys.ENTER, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.ask("penstock.selected")["action"] == "0B0"
    page.press("g")
    assert "Why is rank 0 idle?" in page.text("#explain")
    page.press("d")
    assert page.ask("penstock.theme") == "dark"
    page.press("d", Keys.ESCAPE)
    assert page.ask("penstock.selected") is None
