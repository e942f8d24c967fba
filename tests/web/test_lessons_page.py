"""Promise: lessons can be solved on the page, by keyboard and on a phone, and progress is kept."""

from __future__ import annotations

import pytest
from selenium.webdriver import Keys

from penstock.web.lessons import lessons
from tests.support.browser import BROWSER, DRIVER
from tests.support.page import Page

pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs chromium and chromium-driver")

ROWS = "Object.values(window.location.hash.matchAll(/own[.]lesson-[^=]*=([^&]*)/g).next().value ?? [])[1]"


@pytest.fixture
def fresh(page: Page) -> Page:
    """The list of lessons, without progress."""
    page.go()
    page.driver.execute_script("localStorage.clear()")
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


@pytest.mark.parametrize(
    ("key", "steps", "button", "message"),
    [
        ("recompute", [(0, 5)], "#move-recompute", "Solved."),
        ("zero-bubble", [(2, 7)], "#move-split", "17 units: 3 units above par."),
    ],
)
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


def test_steps_are_paired_and_taken_apart(fresh: Page) -> None:
    open_lesson(fresh, "overlap")
    fresh.point(fresh.reveal(6 + 1), clicks=1)  # 1B0, before 1F1
    fresh.tap("#move-pair")
    assert "(1F1;1B0)OVERLAP_F_B" in fresh.ask(f"decodeURIComponent({ROWS})")
    fresh.tap("#move-pair")
    assert "OVERLAP" not in fresh.ask(f"decodeURIComponent({ROWS})")


def test_a_move_that_does_not_apply_says_what_to_select(fresh: Page) -> None:
    open_lesson(fresh, "overlap")
    fresh.tap("#move-pair")
    assert fresh.text("#lesson-note").startswith("Select a forward directly before a backward")


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
def test_damaged_progress_does_no_harm(fresh: Page, kept: str) -> None:
    fresh.driver.execute_script("localStorage.setItem('penstock.lessons', arguments[0])", kept)
    fresh.go("#mode=lessons")
    fresh.wait("document.querySelectorAll('.lesson').length === 10")
    open_lesson(fresh, "deadlock")
    assert "wait for each other" in verdict(fresh)


def test_an_address_with_a_lesson_that_does_not_exist_opens_the_editor(page: Page) -> None:
    page.go("#mode=edit&lesson=chess")
    page.wait("document.getElementById('verdict')?.innerText")
    assert page.ask("document.getElementById('lesson').hidden")
