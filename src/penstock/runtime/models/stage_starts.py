"""Where stages begin in a model: the checks of the names that `split` is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import accumulate

from torch import nn

from penstock.arguments import printable, some
from penstock.errors import PartitionError

_HOOKS = [name for name in vars(nn.Module()) if name.endswith("hooks")]


def has_hooks(module: nn.Module) -> bool:
    """Return whether the module itself has hooks."""
    return any(vars(module).get(hooks) for hooks in _HOOKS)


def check_starts(
    model: nn.Module, names: Sequence[object], starts: Mapping[str, int], problems: Sequence[str] = ()
) -> None:
    """Raise for what is wrong with the first modules of stages, and for other `problems`.

    `starts` has all names at which a stage can begin, and their positions in the order of the model. A module
    and the first module in it begin at the same position, and the model begins at 0.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found, seen = [], dict[int, str]()
    for name in names:
        start = starts.get(name) if isinstance(name, str) else None
        if start is None:
            found.append(_unknown_name(name, starts, modules))
        elif not start:
            found.append(f"{name!r} is the very first module, so the first stage would be empty: leave it out")
        elif start in seen:
            both = "is a duplicate" if seen[start] == name else f"begins where {seen[start]!r} begins"
            found.append(f"{name!r} {both}, so a stage would be empty: leave one out")
        else:
            seen[start] = str(name)
    in_order = sorted(seen)
    if list(seen) != in_order:
        expected = ", ".join(repr(seen[start]) for start in in_order)
        found.append(f"names must be in the order of the model: {expected}")
    if found or problems:
        raise PartitionError("\n".join([*found, *problems]))


def _unknown_name(name: object, starts: Mapping[str, int], modules: Mapping[str, nn.Module]) -> str:
    problem = f"there is no module {printable(repr(name))} in the model"
    if isinstance(name, str) and name in modules and name:
        outer = [path for path in accumulate(name.split("."), "{}.{}".format) if path in starts]
        if outer and isinstance(modules[""], nn.Sequential):
            kind = type(modules[outer[-1]]).__name__
            return (
                f"{name!r} is inside {outer[-1]!r}, a {kind}, and only an nn.Sequential that does not override "
                f"forward() can be split: begin a stage at {outer[-1]!r} or after it"
            )
        problem = f"no stage can begin at {name!r}, which is inside a layer, or belongs to the stage before"
    valid = [each for each, start in starts.items() if start]
    if close := get_close_matches(str(name), valid):
        return f"{problem}: did you mean {' or '.join(map(repr, close))}?"
    return f"{problem}; stages can begin at {some(list(map(repr, valid)))}"
