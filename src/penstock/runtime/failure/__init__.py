"""Failed steps: the watch, the abort, the report, and agreement before a step."""
