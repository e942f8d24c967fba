"""Plain values to JSON and back without loss: tuples stay tuples, and keys of mappings keep their types."""

from __future__ import annotations

from typing import Any

from penstock.runtime.checkpoints.collective import RankError

__all__ = ["from_json", "to_json"]

_TUPLE, _MAPPING = "!tuple", "!mapping"


def to_json(value: object, where: str) -> Any:
    """The value in a form that json can write; `where` names it in an error."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [to_json(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, tuple):
        return {_TUPLE: to_json(list(value), where)}
    if isinstance(value, dict):
        entries = {key: to_json(each, f"{where}[{key!r}]") for key, each in value.items()}
        if all(isinstance(key, str) and not key.startswith("!") for key in value):
            return entries
        return {_MAPPING: [[to_json(key, f"a key of {where}"), each] for key, each in entries.items()]}
    raise RankError(
        f"{where} is a {type(value).__name__}, which cannot be stored: use numbers, strings, lists, tuples and "
        "mappings (for a tensor, tensor.tolist())"
    )


def from_json(value: Any) -> Any:
    """The value that `to_json` was called with."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(from_json(value[_TUPLE]))
    if _MAPPING in value:
        return {from_json(key): from_json(each) for key, each in value[_MAPPING]}
    return {key: from_json(each) for key, each in value.items()}
