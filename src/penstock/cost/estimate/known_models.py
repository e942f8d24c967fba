"""Well-known models by name: the configs in `models/`, with the sizes that their authors published."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path

from penstock.arguments import did_you_mean, listed, printable
from penstock.errors import FormatError

__all__ = ["is_model_name", "keys_of_model", "known_models"]


@cache
def known_models() -> tuple[str, ...]:
    """The names."""
    return tuple(sorted(Path(each.name).stem for each in files(__package__).joinpath("models").iterdir()))


def is_model_name(source: str) -> bool:
    """Whether a text names a model, not a file: it has no directory and no ending, and no file is called so."""
    path = Path(source)
    return path.name == source and path.suffix.lower() not in (".json", ".toml") and not path.exists()


def keys_of_model(name: str) -> tuple[str, object]:
    """The name and the config of a well-known model; hyphens, underscores and capitals do not matter."""
    by_letters = {_letters(known): known for known in known_models()}
    found = by_letters.get(_letters(name))
    if found is None:
        near = did_you_mean(name, known_models())
        known = f"no such file, and no known model; give a config.json, or one of {listed(known_models())}"
        raise FormatError(printable(name), [known + near])
    text = files(__package__).joinpath("models", f"{found}.json").read_text(encoding="utf-8")
    return found, json.loads(text)


def _letters(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
