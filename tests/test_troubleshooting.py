"""Promise: every message that docs/troubleshooting.md quotes is one that Penstock gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.grids import small
from tests.support.pool import Pool
from tests.support.troubles import ALONE
from tests.support.troubles_of_ranks import TOGETHER

PAGE = (Path(__file__).parents[1] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTES = re.findall(r"^<!-- case: (\w+) -->\n```error\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_every_quote_has_a_trouble_and_every_trouble_a_quote() -> None:
    names = [name for name, _ in QUOTES]
    assert len(names) == len(set(names)) == PAGE.count("```error")
    assert set(names) == {*ALONE, *TOGETHER}


def assert_quoted(name: str, text: str) -> None:
    """The lines of the quote are in the text, one after the other; `...` stands for anything."""
    quote = dict(QUOTES)[name].rstrip("\n")
    pattern = "\n".join(re.escape(line).replace(re.escape("..."), ".*") for line in quote.split("\n"))
    assert re.search(pattern, text), f"{quote}\n--- but:\n{text}"


@pytest.mark.parametrize("name", ALONE)
def test_what_one_process_says_is_what_the_page_quotes(name: str) -> None:
    try:
        said = str(ALONE[name]())
    except ValueError as error:  # what every PenstockError is
        said = f"{type(error).__name__}: {error}"
    assert_quoted(name, said)


@pytest.mark.parametrize("name", TOGETHER)
@small(lambda name: name in {"timeout", "step_and_eval", "one_rank_is_behind"})  # a late rank, and other calls
def test_what_ranks_say_is_what_the_page_quotes(name: str, failing_pool: Pool) -> None:
    lost = (1,) if name in {"lost_rank", "stopped_rank"} else ()
    assert_quoted(name, failing_pool.run(TOGETHER[name], lost=lost)[0])
