"""Promise: any address opens a page that works, or says what is wrong; no script fails."""

from __future__ import annotations

import pytest

from tests.support.browser import BROWSER, DRIVER
from tests.support.page import Page

pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs chromium and chromium-driver")

ADDRESSES = {
    "#mode=edit&edit=constructor": "Valid.",
    "#mode=edit&lesson=v&edit=lesson-v": "Valid.",
    "#own.__proto__=0~1~0F0.0B0&schedules=@__proto__": "a schedule has a family",
    "#schedules=nope,1f1b": "nope",
    "#schedules=1f1b;group=x;stages=-1": "stages_per_rank must be",
    "#ranks=1e9&microbatches=-3": "microbatches",
    "#mode=edit&edit=a&own.a=0~1~%00.<b>": "is not an action",
    "#weights=1e300,-1,x": "weights: expected numbers",
    "#whatif=slow-rank:99:2": "it has ranks 0 to 3",
    "#whatif=:::": "what_if: kind is one of",
    "#%E0%A4%A": "1f1b",
}


@pytest.mark.parametrize(("address", "shown"), ADDRESSES.items())
@pytest.mark.full
def test_a_strange_address_does_no_harm(page: Page, address: str, shown: str) -> None:
    page.driver.get("about:blank")
    page.driver.get(f"{page.playground.url}{address}")
    page.until(lambda: shown in page.text("body"), shown)
    page.wait("document.body.dataset.busy === '0'")
    page.go()
    page.wait("document.querySelectorAll('.panel').length === 3")
    failures = [line for line in page.noise() if "Failed to load resource" not in line]
    assert failures == []  # the browser itself notes answers that are errors
