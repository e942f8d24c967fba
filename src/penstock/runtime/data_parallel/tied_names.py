"""Which weights are tied: declared by the user, recorded by `split`, or one parameter in several stages.

A tied weight is described by its name in each stage, as in {0: "embed.weight", 3: "head.weight"}.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from torch import nn

from penstock.errors import PipelineError
from penstock.runtime.data_parallel.wrappers import named_parameters, split_metadata

__all__ = ["TiedNames", "find_tied_weights"]

TiedNames: TypeAlias = Mapping[int, str]
"""The name of a tied weight by stage."""

_Weight: TypeAlias = tuple[int, int | str]
"""A stage, and the identity of a parameter in it, or its name if the module is on another rank."""


def find_tied_weights(
    declared: Iterable[TiedNames], stages: Mapping[int, nn.Module] | Sequence[nn.Module], count: int
) -> tuple[dict[int, str], ...]:
    """The tied weights that were declared, that `split` recorded, and that stages share here."""
    known = [dict(sorted(tied.items())) for tied in declared]
    problems = [
        f"a tied weight names at least two of the stages 0 to {count - 1}, but {tied} does not"
        for tied in known
        if len(tied) < 2 or not all(stage in range(count) for stage in tied)
    ]
    if problems:
        raise PipelineError("\n".join(problems))
    modules = stages.values() if isinstance(stages, Mapping) else stages
    for module in modules:
        known += [dict(tied) for tied in _recorded(module)]
    if isinstance(stages, Mapping):
        known += _shared_parameters(stages)
    joined = _join(known, stages if isinstance(stages, Mapping) else {})
    found = [_one_name_per_stage(tied, problems) for tied in joined]
    if problems:
        raise PipelineError("\n".join(problems))
    return tuple(sorted(found, key=lambda tied: tuple(tied.items())))


def _recorded(module: nn.Module) -> Sequence[TiedNames]:
    """The tied weights that `split` recorded in a stage; ignores an unrelated attribute of the same name."""
    found = split_metadata(module, "tied")
    return found if isinstance(found, tuple) and all(isinstance(tied, Mapping) for tied in found) else ()


def _shared_parameters(stages: Mapping[int, nn.Module]) -> Iterator[dict[int, str]]:
    """The parameters that several of these stages hold."""
    homes: dict[nn.Parameter, dict[int, str]] = {}
    for stage in sorted(stages):
        for name, parameter in named_parameters(stages[stage]):
            homes.setdefault(parameter, {}).setdefault(stage, name)
    return (tied for tied in homes.values() if len(tied) > 1)


def _join(known: Iterable[TiedNames], stages: Mapping[int, nn.Module]) -> list[dict[_Weight, set[str]]]:
    """Join descriptions that have a weight in common; a weight may have several names in a stage."""
    weights = {(stage, name): id(p) for stage in stages for name, p in named_parameters(stages[stage])}
    joined: list[dict[_Weight, set[str]]] = []
    for tied in known:
        one: dict[_Weight, set[str]] = {}
        for stage, name in tied.items():
            one.setdefault((stage, weights.get((stage, name), name)), set()).add(name)
        for other in [each for each in joined if each.keys() & one.keys()]:
            joined.remove(other)
            for weight, names in other.items():
                one.setdefault(weight, set()).update(names)
        joined.append(one)
    return joined


def _one_name_per_stage(tied: Mapping[_Weight, set[str]], problems: list[str]) -> dict[int, str]:
    """The first name in each stage; a stage cannot have two different parameters of one tied weight."""
    names_by_stage: dict[int, set[str]] = {}
    for (stage, _), names in sorted(tied.items(), key=lambda item: item[0][0]):
        if stage in names_by_stage:
            both = " and ".join(map(repr, sorted(names_by_stage[stage] | names)))
            problems.append(
                f"{both} of stage {stage} are declared as one tied weight: make them one parameter in "
                "the stage, and name it once"
            )
        names_by_stage.setdefault(stage, set()).update(names)
    return {stage: min(names) for stage, names in names_by_stage.items()}
