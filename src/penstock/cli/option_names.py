"""Names of arguments in messages of the library, as the options that the user typed."""

from __future__ import annotations

import re

__all__ = ["with_options"]

_LONG = {"live_limit": "--live", "memory_limit": "--memory", "stages_per_rank": "--stages-per-rank"}
"""Names that only arguments have."""
_SHORT = (
    *("ranks", "microbatches", "moves", "seed", "seconds", "jitter", "quantile", "objective", "placement"),
    *("graph", "group", "step", "replica"),
)
"""Names that are arguments where a message says what they must be."""
_ARGUMENT = re.compile(
    rf"(?<![\w-])({'|'.join(_LONG)}|(?:{'|'.join(_SHORT)})(?= must| is supported|=| of [\w-]+ must)"
    r"|(?<=has no )group)(=)?",
    re.ASCII,
)


def with_options(message: str) -> str:
    """The message with `--live` instead of `live_limit`, `--jitter must` instead of `jitter must`."""

    def option(found: re.Match[str]) -> str:
        return _LONG.get(found[1], f"--{found[1]}") + (" " if found[2] else "")

    return _ARGUMENT.sub(option, message)
