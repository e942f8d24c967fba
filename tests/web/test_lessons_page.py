"""Promise: lessons can be solved on the page, by keyboard and on a phone, and progress is kept."""

from __future__ import annotations

import re

import pytest
from selenium.webdriver import Keys

from penstock.web.lessons import lessons
from tests.support.browser import BROWSER, DRIVER
from tests.support.grids import small
from tests.support.page import Page
from tests.web.test_lessons import SOLUTIONS

pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs chromium and chromium-driver")

ROWS = "Object.values(window.location.hash.matchAll(/own[.]lesson-[^=]*=([^&]*)/g).next().value ?? [])[1]"


@pytest.fixture
def fresh(page: Page) -> Page:
    """The list of lessons, without progress."""
    stored = {"origin": page.playground.url.rstrip("/"), "storageTypes": "local_storage"}
    page.driver.get("about:blank")
    page.driver.execute_cdp_cmd("Storage.clearDataForOrigin", stored)
    page.go("#mode=lessons")
    page.wait("document.querySelector('.lessons')")
    return page


def verdict(page: Page) -> str:
    page.quiet()
    return page.text("#lesson-verdict")


def open_lesson(page: Page, key: str) -> None:
    page.tap(f"#lesson-{key}")
    page.wait("document.getElementById('lesson-verdict')?.innerText")
    page.quiet()


def tab_to(page: Page, condition: str) -> None:
    """Press Tab until the focused element meets a condition."""
    for _ in range(60):
        if page.ask(f"document.activeElement.matches({condition!r})"):
            return
        page.press(Keys.TAB)
    raise AssertionError(condition)


@pytest.mark.full
def test_a_lesson_is_solved_with_the_keyboard_alone_and_progress_stays(fresh: Page) -> None:
    page = fresh
    page.go()
    tab_to(page, "#mode-lessons")
    page.press(Keys.ENTER)
    page.wait("document.querySelector('.lessons')")
    tab_to(page, "#lesson-warm-up")
    page.press(Keys.ENTER)
    page.wait("document.getElementById('lesson-verdict')?.innerText")
    assert verdict(page) == "18 units: 6 units above par."
    tab_to(page, ".plot")
    page.press(Keys.ENTER, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)  # 0F1
    page.press("[")
    page.wait("document.getElementById('lesson-verdict').innerText.startsWith('15 units')")
    page.quiet()
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)  # 0F2
    for _ in range(2):
        page.press("[")
        page.quiet()
    page.wait("document.getElementById('lesson-verdict').innerText.startsWith('Solved.')")
    assert lessons()["warm-up"].explanation in verdict(page)
    page.go("#mode=lessons")
    page.wait("document.querySelector('.lesson.solved')")
    assert "You solved 1 of 10." in page.text("#mode-panel")
    page.tap("#lessons-forget")
    assert page.texts(".lesson.solved") == []


def rows_of(page: Page) -> list[list[str]]:
    """The attempt, as it is in the address."""
    return [row.split(".") for row in page.ask(f"decodeURIComponent({ROWS})").split("~")[2:]]


def select(page: Page, rank: int, index: int) -> tuple[int, int]:
    """Click a step; returns where it is."""
    place = page.reveal(sum(map(len, rows_of(page)[:rank])) + index)
    page.point(place, clicks=1)
    return place


def drag_earlier(page: Page, rank: int, source: int, target: int) -> None:
    first = sum(map(len, rows_of(page)[:rank]))
    start = page.reveal(first + source)
    page.drag(start, (page.place(first + target)[0] - 5, start[1]))


def change(page: Page, wanted: list[list[str]]) -> None:
    """Split backwards, and add recomputations, as the solution has them."""
    for rank, steps in enumerate(wanted):
        for step in steps:
            if "RECOMPUTE" in step:
                select(page, rank, rows_of(page)[rank].index(step.replace("RECOMPUTE", "B")))
                page.tap("#move-recompute")
            elif "I" in step and step not in rows_of(page)[rank]:
                select(page, rank, rows_of(page)[rank].index(step.replace("I", "B")))
                page.tap("#move-split")


@pytest.mark.parametrize("key", SOLUTIONS)
@small(lambda key: key == "slow-link")
def test_every_lesson_is_solved_with_the_pointer(fresh: Page, key: str) -> None:
    page, text = fresh, SOLUTIONS[key]
    open_lesson(page, key)
    apart = re.sub(r"\((\w+);(\w+)\)OVERLAP_F_B", r"\1 \2", text)
    wanted = [row.split() for row in apart.split("|")]
    change(page, wanted)
    for rank, steps in enumerate(wanted):
        for place, step in enumerate(steps):
            source = rows_of(page)[rank].index(step)
            if source != place:
                drag_earlier(page, rank, source, place)
                assert rows_of(page)[rank][place] == step
    for rank, row in enumerate(text.split("|")):
        for place, step in enumerate(row.split()):
            if "OVERLAP" in step:
                select(page, rank, place)
                page.tap("#move-pair")
    assert rows_of(page) == [row.split() for row in text.split("|")]
    page.wait("document.getElementById('lesson-verdict').innerText.startsWith('Solved.')")
    assert lessons()[key].explanation in verdict(page)


@pytest.mark.parametrize(
    ("key", "steps", "button", "message"),
    [
        ("recompute", [(0, 5)], "#move-recompute", "Solved."),
        ("zero-bubble", [(2, 7)], "#move-split", "17 units: 3 units above par."),
    ],
)
@pytest.mark.full
def test_the_moves_of_a_lesson_are_buttons(
    fresh: Page, key: str, steps: list[tuple[int, int]], button: str, message: str
) -> None:
    open_lesson(fresh, key)
    before = verdict(fresh)
    lengths = [len(row.split()) for row in lessons()[key].steps]
    for rank, index in steps:
        fresh.point(fresh.reveal(sum(lengths[:rank]) + index), clicks=1)
        fresh.tap(button)
    fresh.wait(f"document.getElementById('lesson-verdict').innerText.startsWith({message!r})")
    fresh.tap("#undo")
    fresh.wait(f"document.getElementById('lesson-verdict').innerText === {before!r}")


@pytest.mark.full
def test_steps_are_paired_and_taken_apart(fresh: Page) -> None:
    open_lesson(fresh, "overlap")
    fresh.point(fresh.reveal(6 + 1), clicks=1)  # 1B0, before 1F1
    fresh.tap("#move-pair")
    assert "(1F1;1B0)OVERLAP_F_B" in fresh.ask(f"decodeURIComponent({ROWS})")
    fresh.tap("#move-pair")
    assert "OVERLAP" not in fresh.ask(f"decodeURIComponent({ROWS})")


@pytest.mark.full
def test_a_move_that_does_not_apply_says_what_to_select(fresh: Page) -> None:
    open_lesson(fresh, "overlap")
    fresh.tap("#move-pair")
    assert fresh.text("#lesson-note").startswith("Select a forward directly before a backward")


@pytest.mark.full
def test_on_a_phone_a_lesson_is_solved_by_tapping(fresh: Page) -> None:
    fresh.resize((390, 844))
    fresh.go("#mode=lessons")
    open_lesson(fresh, "deadlock")
    assert "wait for each other" in verdict(fresh)
    for _ in range(2):
        fresh.tap("#lesson-hint")
    assert len(fresh.texts(".hints li")) == 2
    for step in (6 + 3, 6 + 3, 3):  # 1F1 twice earlier: F0 F1 F2 B0; then 0F2
        fresh.point(fresh.reveal(step), clicks=1)
        fresh.tap("#earlier")
    fresh.point(fresh.reveal(6 + 3), clicks=1)  # 1B0 ahead of 1F2
    fresh.tap("#earlier")
    assert fresh.ask("document.documentElement.scrollWidth <= innerWidth")
    assert "Solved." in verdict(fresh)
    fresh.tap("#lesson-next")
    fresh.wait("document.querySelector('#lesson h2').innerText.includes('Zero bubble')")


@pytest.mark.full
def test_back_and_forward_go_through_attempts_and_out_of_the_lesson(fresh: Page) -> None:
    open_lesson(fresh, "heavy-last-stage")
    assert verdict(fresh) == "39 units: 9 units above par."
    fresh.tap("#lesson-again")
    fresh.driver.back()
    fresh.wait("document.querySelector('.lessons')")
    fresh.driver.forward()
    fresh.wait("document.getElementById('lesson-verdict')?.innerText")
    fresh.tap("#mode-compare")
    assert fresh.ask("location.hash") == ""  # the costs and the limit of the lesson are gone
    assert not fresh.ask("document.body.hasAttribute('data-lesson')")


@pytest.mark.parametrize(
    "kept", ["{", "[]", "null", '{"warm-up": 7, "v": {"steps": [[1]]}, "deadlock": {"steps": [["x"]]}}']
)
@pytest.mark.full
def test_damaged_progress_does_no_harm(fresh: Page, kept: str) -> None:
    fresh.driver.execute_script("localStorage.setItem('penstock.lessons', arguments[0])", kept)
    fresh.go("#mode=lessons")
    fresh.wait("document.querySelectorAll('.lesson').length === 10")
    open_lesson(fresh, "deadlock")
    assert "wait for each other" in verdict(fresh)


@pytest.mark.full
def test_an_address_with_a_lesson_that_does_not_exist_opens_the_editor(page: Page) -> None:
    page.go("#mode=edit&lesson=chess")
    page.wait("document.getElementById('verdict')?.innerText")
    assert page.ask("document.getElementById('lesson').hidden")
