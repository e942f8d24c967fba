"""Promises of estimated and simulated steps: they reproduce published MFU, memory and step times."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks import published

from tests.support.grids import small

PAGE = Path(__file__).parents[2] / "docs" / "how_true.md"


@pytest.mark.parametrize(("ranks", "sequence"), published.MFU)
@small(lambda ranks: ranks == 8)
def test_ratios_of_mfu_between_vocabularies_are_the_published_ones(ranks: int, sequence: int) -> None:
    assert max(map(abs, published.ratio_errors(ranks, sequence))) < 0.025
    absolute = [each.mfu for each in published.vocabulary_row(ranks, sequence)]
    assert absolute == pytest.approx(published.MFU[ranks, sequence], rel=0.06)


def test_memory_grows_with_the_vocabulary_as_published() -> None:
    peaks = [each.peak / 2**30 for each in published.vocabulary_row(8, 2048)]
    assert peaks == pytest.approx(published.PEAK_GIB, rel=0.02)
    mine, theirs = ([b - a for a, b in pairwise(row)] for row in (peaks, published.PEAK_GIB))
    assert mine == pytest.approx(theirs, rel=0.1)


def test_llama_loses_between_its_two_published_values_with_half_the_microbatches() -> None:
    many, few = (published.llama(replicas).run() for replicas in (64, 128))
    assert 1 - 41 / 43 < 1 - few.mfu / many.mfu < 1 - 400 / 430
    assert many.mfu == pytest.approx(43, rel=0.2)


@pytest.mark.parametrize("name", ["vocabulary", "clusters", "shares"])
@small(lambda name: name == "none")
def test_the_page_shows_what_the_command_prints(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    getattr(published, f"print_{name}")()
    assert capsys.readouterr().out in PAGE.read_text(encoding="utf-8")


@small(lambda: False)
def test_clusters_scale_within_the_bands_of_the_page() -> None:
    mega = [published.megascale(replicas).run().mfu for replicas in (48, 96, 128, 192)]
    assert mega == sorted(mega, reverse=True)
    for mine, theirs in zip(mega[1:], (57.3, 54.9, 55.2)):
        assert mine / mega[0] == pytest.approx(theirs / 59.1, rel=0.06)
    first, last = (published.nemotron(replicas).run().seconds for replicas in (2, 32))
    assert 1 < last / first < 4.84 / 4.61
    assert (first, last) == pytest.approx((4.61, 4.84), rel=0.05)
    one, two = (
        published.titan(*each).run().tokens_per_second for each in (("1f1b", 1), ("interleaved-1f1b", 2))
    )
    assert two / one == pytest.approx(1.28, rel=0.06)
