"""Promises of the editor and the search on the page, by dragging, clicking and typing."""

from __future__ import annotations

import re

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import penstock
from tests.support.browser import BROWSER, DRIVER
from tests.support.grids import small
from tests.support.kineto_files import write_kineto_files
from tests.support.page import Page

pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="chromium is not installed")

SMALL = "#schedules=1f1b&ranks=2&microbatches=2&mode=edit"
"""Rank 0: 0F0 0F1 0B0 0B1; rank 1: 1F0 1B0 1F1 1B1."""


def steps(page: Page) -> str:
    """The rows of the schedule in the address."""
    found = page.ask(
        "[...new URLSearchParams(location.hash.slice(1))].find(([k]) => k.startsWith('own.'))?.[1]"
    )
    return " | ".join(row.replace(".", " ") for row in found.split("~")[2:])


def open_small(page: Page) -> None:
    page.go(SMALL)
    page.wait("document.getElementById('verdict')?.textContent.includes('Valid')")


@small(lambda any_size: any_size == "desktop")
def test_a_step_is_dragged_along_its_rank_and_the_verdict_follows(any_size: Page) -> None:
    page = any_size
    open_small(page)
    x, y = page.reveal(1)
    page.drag((x, y), (page.place(2)[0] + 2, y))
    assert steps(page) == "0F0 0B0 0F1 0B1 | 1F0 1B0 1F1 1B1"
    assert "Valid" in page.text("#verdict")
    assert "makespan 12 units +33.3 %" in page.text("#verdict").replace("\n", " ")
    assert "peak memory 1 activation −50.0 %" in page.text("#verdict").replace("\n", " ")
    page.tap("#undo")
    assert steps(page) == "0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1"
    page.tap("#redo")
    assert steps(page).startswith("0F0 0B0")
    page.driver.back()
    page.until(lambda: steps(page).startswith("0F0 0F1"))


@pytest.mark.full
def test_a_step_is_dragged_with_shift_to_swap_and_off_its_rank_to_remove_it(page: Page) -> None:
    open_small(page)
    x, y = page.reveal(0)
    page.drag((x, y), (page.place(2)[0], y), shift=True)  # 0F0 and 0B0
    assert steps(page).startswith("0B0 0F1 0F0 0B1 |")
    page.tap("#undo")
    x, y = page.reveal(1)
    page.drag((x, y), (x, y - 90))
    assert steps(page).startswith("0F0 0B0 0B1 |")
    assert page.text("#verdict").startswith("Unfinished")


@pytest.mark.full
def test_a_deadlock_is_told_in_words_and_drawn(page: Page) -> None:
    open_small(page)
    _, y = page.reveal(4)
    page.drag(page.place(6), (page.place(4)[0] - 6, y))  # 1F1 to the front of rank 1
    page.drag(page.place(7), (page.place(5)[0] - 6, y))  # 1B1 behind it
    page.drag(page.place(1), (page.place(3)[0] - 3, page.place(3)[1]))  # 0F1 behind 0B0
    text = page.text("#verdict")
    assert "Deadlock" in text
    assert "0B0 on rank 0 waits for 1B0 on rank 1" in text
    assert "Try: on rank 0, move 0F1 before 0B0" in text
    assert "not valid, so it has no times" in page.text("#table")


@pytest.mark.full
def test_steps_are_swapped_moved_and_removed_with_the_keyboard(page: Page) -> None:
    open_small(page)
    page.driver.find_element(By.CSS_SELECTOR, ".plot").click()
    page.press(Keys.ESCAPE, Keys.ENTER, Keys.ARROW_RIGHT)
    assert page.ask("penstock.selected")["action"] == "0F1"
    page.press("]")
    page.quiet()
    assert steps(page).startswith("0F0 0B0 0F1 0B1")
    page.press("[")
    page.quiet()
    page.press("{")
    page.quiet()
    assert steps(page).startswith("0F1 0F0 0B0 0B1")
    page.press(Keys.DELETE)
    page.quiet()
    assert page.text("#verdict").startswith("Unfinished")
    for _ in range(4):
        page.driver.switch_to.active_element.send_keys(Keys.CONTROL, "z")
        page.quiet()
    assert steps(page) == "0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1"


@pytest.mark.full
def test_a_schedule_is_built_from_nothing_with_what_could_run_next(any_size: Page) -> None:
    page = any_size
    open_small(page)
    page.tap("#edit-empty")
    for _ in range(8):
        labels = page.texts("#ready button")
        wanted = next(label for label in labels if label[1] != "I")
        page.tap("#ready button", labels.index(wanted))
    assert "Valid" in page.text("#verdict")
    page.tap("#edit-compare")
    assert page.texts(".panel h2") == ["1f1b", "mine"]


@pytest.mark.full
def test_a_building_block_is_stamped(page: Page) -> None:
    page.go("#schedules=gpipe&ranks=3&microbatches=6&mode=edit")
    page.wait("document.getElementById('verdict')?.textContent.includes('gpipe')")
    page.tap(".editor details summary")
    page.type("#stamp-interval", 3)
    page.tap("#stamp")
    assert "Valid" in page.text("#verdict")
    built = penstock.build("gpipe", ranks=3, microbatches=6)
    assert steps(page) != " | ".join(" ".join(map(str, row)) for row in built.ranks)
    assert steps(page).split(" | ")[2].startswith("2F0 2F1")


@pytest.mark.full
def test_a_csv_file_is_opened_and_junk_is_explained(
    page: Page, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files")
    built = penstock.build("zb-h1", ranks=2, microbatches=3)
    built.write(folder / "mine.csv")
    (folder / "junk.csv").write_text("0F0,what\n")
    page.go("#schedules=1f1b&ranks=2&microbatches=3")
    field = page.driver.find_element(By.ID, "file")
    field.send_keys(str(folder / "mine.csv"))
    page.until(lambda: page.texts(".panel h2") == ["1f1b", "mine"])
    page.quiet()
    field.send_keys(str(folder / "junk.csv"))
    page.until(lambda: "is not an action" in page.text("#message"))
    assert page.noise() != []  # the browser logs the refusal
    assert page.texts(".panel h2") == ["1f1b", "mine"]


DROP = """
const data = new DataTransfer();
for (const [name, text] of arguments[0]) data.items.add(new File([text], name, { type: "text/csv" }));
for (const kind of ["dragenter", "dragover", "drop"]) {
  document.body.dispatchEvent(new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true }));
}
"""


def csv(family: str) -> str:
    return "\n".join(",".join(map(str, row)) for row in penstock.build(family, ranks=2, microbatches=3).ranks)


@pytest.mark.full
def test_a_file_that_is_dropped_in_the_editor_is_edited(page: Page) -> None:
    open_small(page)
    page.driver.execute_script(DROP, [["dropped.csv", csv("gpipe")]])
    page.until(lambda: "Edit dropped" in page.text("#mode-panel"))
    page.until(lambda: "gpipe" in page.text("#verdict"))
    assert page.ask("document.getElementById('drop').hidden")


@pytest.mark.full
def test_of_several_files_each_bad_one_has_its_message_and_the_good_ones_are_drawn(page: Page) -> None:
    page.go("#schedules=1f1b&ranks=2&microbatches=3")
    texts = {"bad.csv": "0F0,what\n", "good.csv": csv("gpipe"), "notes.txt": "", "fine.csv": csv("zb-h1")}
    page.driver.execute_script(DROP, list(texts.items()))
    page.until(lambda: page.texts(".panel h2") == ["1f1b", "good", "fine"])
    page.until(lambda: "notes.txt: a schedule is a .csv or .json file" in page.text("#message"))
    page.quiet()
    assert "bad.csv: " in page.text("#message")
    assert "is not an action" in page.text("#message")
    assert page.noise() != []  # the browser logs the refusal
    page.type("#microbatches", 4)  # something else is done
    assert page.text("#message") == ""


@pytest.mark.full
def test_a_search_opened_by_its_address_tells_its_progress_in_the_units_of_its_costs(page: Page) -> None:
    page.go("#ranks=5&microbatches=24&stages=2&limit=3.5&mode=search")
    assert "within 3.5 activations per rank" in page.text("#search-question")
    page.type("#search-seconds", 100)
    page.tap("#search-start")
    status = page.until(lambda: "best" in page.text("#search-status") and page.text("#search-status"))
    assert re.search(r"best [0-9.]+ units, bound [0-9.]+ units", status), status
    page.tap("#search-stop")
    page.until(lambda: page.texts("#certificate"))


@pytest.mark.full
def test_a_search_converges_and_its_result_is_kept(any_size: Page) -> None:
    page = any_size
    page.go("#ranks=3&microbatches=4&limit=3&mode=search")
    page.tap("#search-start")
    page.until(lambda: page.texts("#certificate"))
    assert page.text("#certificate").startswith("Proved optimal: no schedule of this work has a makespan below")
    assert page.ask("document.querySelectorAll('#search-chart path').length") == 2
    page.tap("#search-keep")
    page.until(lambda: page.texts(".panel h2")[-1:] == ["found"])


@pytest.mark.full
def test_a_search_is_stopped_and_the_best_is_kept(page: Page) -> None:
    page.go("#ranks=5&microbatches=24&stages=2&limit=3.5&mode=search")
    page.type("#search-seconds", 100)
    page.tap("#search-start")
    page.until(lambda: "best" in page.text("#search-status"))
    page.tap("#search-stop")
    page.until(lambda: page.texts("#certificate"))
    assert "Stopped" in page.text("#search-status")
    assert page.texts(".panel h2") != []


@pytest.mark.full
def test_traces_are_dropped_and_drawn_over_the_prediction(
    any_size: Page, tmp_path_factory: pytest.TempPathFactory
) -> None:
    page = any_size
    costs = penstock.Costs(forward=0.1, backward=0.25, latency=0.01)
    timeline = penstock.simulate(penstock.build("1f1b", ranks=2, microbatches=4), costs)
    paths = write_kineto_files(tmp_path_factory.mktemp("traces"), timeline)
    page.go("#schedules=1f1b&ranks=2&microbatches=4")
    page.driver.find_element(By.ID, "file").send_keys("\n".join(map(str, paths)))
    page.until(lambda: page.texts(".panel h2") == ["measured", "predicted"])
    assert "Order: 1f1b" in page.text("#trace")
    page.quiet()
    page.tap("#trace-costs")
    page.until(lambda: page.texts(".panel h2")[0] == "traced")
    assert "forward_seconds=0.1" in page.ask("location.hash")
