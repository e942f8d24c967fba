"""Weights that several stages hold, such as an embedding that is also the output head.

    on one rank       the stages hold the very same parameter, so there is nothing to do
    on several ranks  each has a copy; after a step the gradients are summed over the holders, so that
                      optimizers that do the same keep the copies the same, which is checked at every step

A tie is a mapping from stage to the name of the weight in it, as in {0: "embed.weight", 3: "head.weight"}.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from penstock.errors import PipelineError
from penstock.ir.schedule import Schedule
from penstock.runtime.data_parallel.fsdp import Shards
from penstock.runtime.data_parallel.gradient_buckets import Row, differing, mark_of
from penstock.runtime.data_parallel.wrappers import named_parameters, noted, owners
from penstock.runtime.dtensors import is_dtensor, local
from penstock.runtime.transport.communicator import Communicator

__all__ = ["Tie", "Ties", "find_ties"]

Tie = Mapping[int, str]


def find_ties(
    declared: Iterable[Tie], stages: Mapping[int, nn.Module] | Sequence[nn.Module], count: int
) -> tuple[dict[int, str], ...]:
    """The ties that were declared, that `split` found, and those of stages that share a parameter here."""
    known = [dict(sorted(tie.items())) for tie in declared]
    faults = [
        f"a tie names at least two of the stages 0 to {count - 1}: {tie} does not"
        for tie in known
        if len(tie) < 2 or not all(stage in range(count) for stage in tie)
    ]
    if faults:
        raise PipelineError("\n".join(faults))
    modules = stages.values() if isinstance(stages, Mapping) else stages
    for module in modules:
        known += [dict(tie) for tie in _noted(module)]
    if isinstance(stages, Mapping):
        known += _shared(stages)
    merged = _merged(known, stages if isinstance(stages, Mapping) else {})
    return tuple(sorted(merged, key=lambda tie: tuple(tie.items())))


def _noted(module: nn.Module) -> Sequence[Tie]:
    """What `split` has noted in a stage; somebody else's `tied` is left alone."""
    found = noted(module, "tied")
    return found if isinstance(found, tuple) and all(isinstance(tie, Mapping) for tie in found) else ()


def _merged(known: Iterable[Tie], stages: Mapping[int, nn.Module]) -> list[dict[int, str]]:
    """Ties that have a weight in common are one; a weight with two names in a stage has the first of them."""
    weights = {(stage, name): id(p) for stage in stages for name, p in named_parameters(stages[stage])}
    merged: list[dict[tuple[int, int | str], set[str]]] = []
    for tie in known:
        one: dict[tuple[int, int | str], set[str]] = {}
        for stage, name in tie.items():
            one.setdefault((stage, weights.get((stage, name), name)), set()).add(name)
        for other in [each for each in merged if each.keys() & one.keys()]:
            merged.remove(other)
            for weight, names in other.items():
                one.setdefault(weight, set()).update(names)
        merged.append(one)
    found, faults = [], []
    for one in merged:
        names_by_stage: dict[int, set[str]] = {}
        for (stage, _), names in sorted(one.items(), key=lambda item: item[0][0]):
            if stage in names_by_stage:
                told = " and ".join(map(repr, sorted(names_by_stage[stage] | names)))
                faults.append(
                    f"ties make one weight of {told} of stage {stage}: make them one parameter there, and name "
                    "it once"
                )
            names_by_stage.setdefault(stage, set()).update(names)
        found.append({stage: min(names) for stage, names in names_by_stage.items()})
    if faults:
        raise PipelineError("\n".join(faults))
    return found


def _shared(stages: Mapping[int, nn.Module]) -> Iterator[dict[int, str]]:
    """One parameter in several of these stages."""
    homes: dict[nn.Parameter, dict[int, str]] = {}
    for stage in sorted(stages):
        for name, parameter in named_parameters(stages[stage]):
            homes.setdefault(parameter, {}).setdefault(stage, name)
    return (tie for tie in homes.values() if len(tie) > 1)


class Ties:
    """The ties of a pipeline as one rank sees them."""

    def __init__(
        self,
        ties: Sequence[Tie],
        modules: Mapping[int, nn.Module],
        shards: Mapping[int, Shards],
        schedule: Schedule,
        rank: int,
    ) -> None:
        self.all = tuple(ties)
        self._modules, self._shards = modules, shards
        hosts = schedule.placement.stage_to_rank
        self._owners: dict[tuple[int, str], tuple[nn.Module, str]]
        """By stage and name of a tied weight: the module that has it, and its name there."""
        self._find_owners()
        self._shared_by: list[tuple[Tie, tuple[int, ...]]] = []
        """The ties of this rank that others have a part in, with the ranks that do."""
        for tie in ties:
            own = self._own_stages(tie)
            for stage in own[1:]:
                self._unite(tie, own[0], stage)
            if own and len(ranks := _ranks_of(tie, hosts)) > 1:
                self._shared_by.append((tie, ranks))
        self._first = {str(tie): hosts[min(tie)] for tie in ties}
        """The rank of the first stage of each tie."""
        self._rank = rank
        self.holders = sorted({ranks for tie in ties if len(ranks := _ranks_of(tie, hosts)) > 1})
        """All sets of ranks that hold a weight together, the same on every rank."""
        self._settled: dict[nn.Parameter, Tensor | None] = {}
        self.unsummed = False
        """Whether there are gradients that no step has summed yet."""

    @property
    def counted_elsewhere(self) -> set[nn.Parameter]:
        """The parameters of this rank that another rank counts, where each is to be counted once."""
        return {parameter for tie, _, parameter in self._own() if not self._is_first(tie)}

    def _is_first(self, tie: Tie) -> bool:
        return self._first[str(tie)] == self._rank

    def _find_owners(self) -> None:
        """Where the tied weights of this rank are; done again in every step, for parts may be replaced."""
        wanted = dict.fromkeys((stage, tie[stage]) for tie in self.all for stage in self._own_stages(tie))
        self._owners = {
            (stage, name): (owner, own_name)
            for stage in dict.fromkeys(stage for stage, _ in wanted)
            for name, owner, own_name in owners(self._modules[stage])
            if (stage, name) in wanted
        }
        if missing := [place for place in wanted if place not in self._owners]:
            raise PipelineError(
                "\n".join(
                    f"tied weight {name!r} of stage {stage}: there is no such parameter in it"
                    for stage, name in missing
                )
            )

    def _parameter(self, tie: Tie, stage: int) -> nn.Parameter:
        """The parameter as it is now: it may have been replaced, by sharding for example."""
        owner, own_name = self._owners[stage, tie[stage]]
        return owner.get_parameter(own_name)

    def _unite(self, tie: Tie, first: int, second: int) -> None:
        """Let two stages of this rank hold the very same parameter."""
        kept, other = self._parameter(tie, first), self._parameter(tie, second)
        if kept is other:
            return
        if _looks(kept) != _looks(other):
            raise PipelineError(
                f"tied weights look different: {tie[first]!r} of stage {first} is {_looks(kept)}, "
                f"{tie[second]!r} of stage {second} is {_looks(other)}"
            )
        if not torch.equal(local(kept), local(other)):
            raise PipelineError(_diverged(tie, [first, second]))
        if second in self._shards:
            self._shards[second].hold(kept, self._shards[first], other)
            return
        for module in self._modules[second].modules():
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if parameter is other:
                    setattr(module, name, kept)

    # --- between ranks -----------------------------------------------------------------------------

    def looks(self) -> dict[str, str]:
        """What all holders must agree on: for each tie that this rank shares, what its weight looks like."""
        return {str(dict(tie)): ", ".join(_looks(parameter)) for tie, _, parameter in self._own()}

    def _own(self) -> Iterator[tuple[Tie, tuple[int, ...], nn.Parameter]]:
        for tie, ranks in self._shared_by:
            yield tie, ranks, self._parameter(tie, self._own_stages(tie)[0])

    def _own_stages(self, tie: Tie) -> list[int]:
        return [stage for stage in tie if stage in self._modules]

    def begin(self, links: Communicator | None) -> None:
        """Before a step: the copies must be the same, and a gradient that is summed already stays with one."""
        self._find_owners()
        self._refuse_parted()
        if links is None:
            return
        for tie, ranks, parameter in self._own():
            if any(differing(mark_of(parameter).reshape(1), partial(links.subgroup_max, ranks=ranks))):
                raise PipelineError(_diverged(tie, sorted(tie)))
            if not self.unsummed and not self._is_first(tie):
                self._settled[parameter], parameter.grad = parameter.grad, None

    def _refuse_parted(self) -> None:
        """What was united when the pipeline was made must be one parameter still."""
        for tie in self.all:
            own = self._own_stages(tie)
            parted = [
                stage for stage in own[1:] if self._parameter(tie, stage) is not self._parameter(tie, own[0])
            ]
            if parted:
                told = " and ".join(f"{tie[stage]!r} of stage {stage}" for stage in (own[0], *parted))
                raise PipelineError(
                    f"tied weights are no longer one parameter: {told} were replaced since the pipeline was "
                    "made, by load_state_dict(assign=True) for example: load without it, or make another one"
                )

    def finish(self, links: Communicator | None, *, sums: bool) -> None:
        """After a step: every holder gets the sum of all gradients, unless more are to come."""
        self.unsummed = not sums and bool(self._shared_by)
        if links is not None and sums:
            for _, ranks, parameter in self._own():
                row = Row([parameter])
                row.unpack(links.subgroup_sum(row.packed(), ranks))
        self._settled.clear()

    def drop(self) -> None:
        """A step failed: gradients that were put aside come back."""
        for parameter, before in self._settled.items():
            parameter.grad = before
        self._settled.clear()
        self.unsummed = False


def _ranks_of(tie: Tie, hosts: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({hosts[stage] for stage in tie}))


def _looks(parameter: Tensor) -> tuple[str, ...]:
    """Shape, type, and how it is shared out."""
    shown = [str(list(parameter.shape)), str(parameter.dtype).removeprefix("torch.")]
    if is_dtensor(parameter):
        mesh = parameter.device_mesh
        shown += [f"placed {parameter.placements}", f"on a mesh of {list(mesh.shape)}"]
    return tuple(shown)


def _diverged(tie: Tie, stages: Sequence[int]) -> str:
    told = " and ".join(f"{tie[stage]!r} of stage {stage}" for stage in stages)
    return (
        f"tied weights have diverged: {told} must hold the same numbers, and do not. Start them from the same "
        "numbers (the same seed or checkpoint on every rank), and train them with the same optimizer options"
    )
