"""Promises of the demo's report: it starts with the result, explains its words, and fits a phone."""

from __future__ import annotations

import re

import penstock
from penstock.cli.demo import demo_page_head
from penstock.view.html import html

HEAD = demo_page_head(
    ["Found is <b>6 %</b> faster.", "Measured with 10 steps.", "Gradients match."],
    [["schedule", "bubble", "peak live activations"], ["1f1b", "20%", "2"], ["found", "10%", "2"]],
    [3.0, 2.0],
    "2 CPUs",
)


def test_the_result_is_the_first_text_of_the_page() -> None:
    timeline = penstock.simulate(penstock.build("1f1b", ranks=2, microbatches=2))
    page = html([timeline], "demo", HEAD)
    body = page.split("<body>")[1]
    texts = [text.strip() for text in re.sub(r"<[^>]*>", "\n", body).splitlines() if text.strip()]
    assert texts[0] == "Found is &lt;b&gt;6 %&lt;/b&gt; faster."


def test_every_column_of_the_table_is_explained() -> None:
    explained = HEAD.split("</table>")[1]
    for word in ("1f1b", "found", "bubble", "live activations"):
        assert word in explained
