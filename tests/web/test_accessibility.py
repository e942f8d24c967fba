"""Promise: axe-core finds nothing serious on any view of the page, light and dark, on desktop and phone."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest

from tests.support.browser import BROWSER, DRIVER
from tests.support.grids import small
from tests.support.page import Page

pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs chromium and chromium-driver")

LESSON = (
    "#mode=edit&edit=lesson-deadlock&lesson=deadlock&same=0&own.lesson-deadlock=0.1.2~3~0F0.0F1.0B0.0F2.0B1.0B2"
    "~1F0.1F2.1B0.1F1.1B1.1B2~2F0.2B0.2F1.2B1.2F2.2B2"
)
VIEWS = {
    "compare": "",
    "what-if": "#pareto=1&limit=6&jitter=0.1&whatif=slow-rank:1:1.5",
    "error": "#schedules=1f1b,zbv&ranks=4&microbatches=0",
    "edit": "#mode=edit",
    "search": "#mode=search",
    "lessons": "#mode=lessons",
    "lesson": LESSON,
}


def findings(page: Page) -> list[str]:
    page.driver.execute_script(files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
    result: Any = page.driver.execute_async_script(
        "const done = arguments[0]; axe.run().then(done, (error) => done(String(error)))"
    )
    assert len(result["passes"]) > 15  # it looked at something
    return [
        f"{found['id']}: {found['help']}: {[node['html'] for node in found['nodes'][:3]]}"
        for found in result["violations"]
        if found["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
@small(
    lambda view, theme, any_size: (
        (view, theme, any_size) in {("compare", "light", "desktop"), ("lesson", "dark", "phone")}
    )
)
@pytest.mark.full
def test_nothing_serious_is_found(any_size: Page, view: str, theme: str) -> None:
    page = any_size
    page.driver.set_script_timeout(120)
    media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    page.go(VIEWS[view])
    assert page.ask("document.documentElement.dataset.theme") == theme
    assert findings(page) == []


@pytest.mark.full
def test_the_dialog_of_keys_has_nothing_serious(page: Page) -> None:
    page.driver.set_script_timeout(120)
    page.go()
    page.tap("#help")
    page.wait("document.getElementById('keys').open")
    assert findings(page) == []
