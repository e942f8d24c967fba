"""Failed steps: the failure monitor, the abort, the report, and the agreement of ranks when they connect."""
