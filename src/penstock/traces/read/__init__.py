"""Measured runs: traces and logs of other tools, read as timelines and costs."""
