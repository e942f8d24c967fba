"""Tied weights: weights that several stages hold, such as an embedding that is also the output layer.

They are declared by the user, recorded by `split`, or one parameter in several stages. A tied weight is
described by its name in each stage, as in {0: "embed.weight", 3: "head.weight"}.

    on one rank       the stages hold the same parameter, so there is nothing to do
    on several ranks  each rank has a copy; after a step the ranks sum the gradients, so that equal optimizers
                      keep the copies equal, which is checked before every step
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import PipelineError
from penstock.ir.schedule import Schedule
from penstock.runtime.data_parallel.replica_group import GradientBucket, checksum, differing
from penstock.runtime.data_parallel.wrappers import named_parameters, owners, split_metadata
from penstock.runtime.dtensors import is_dtensor, local
from penstock.runtime.torch_internals.data_parallel import FsdpShards
from penstock.runtime.transport.communicator import Communicator

TiedNames: TypeAlias = Mapping[int, str]
"""The name of a tied weight by stage."""

_Weight: TypeAlias = tuple[int, int | str]
"""A stage, and the identity of a parameter in it, or its name if the module is on another rank."""


def find_tied_weights(
    declared: Iterable[TiedNames], stages: Mapping[int, nn.Module] | Sequence[nn.Module], count: int
) -> tuple[dict[int, str], ...]:
    """Return the tied weights that were declared, that `split` recorded, and that stages share here."""
    known = [dict(sorted(tied.items())) for tied in declared]
    problems = [
        f"a tied weight names at least two of the stages 0 to {count - 1}, but {tied} does not"
        for tied in known
        if len(tied) < 2 or not all(stage in range(count) for stage in tied)
    ]
    if problems:
        raise PipelineError("\n".join(problems))
    numbered = stages if isinstance(stages, Mapping) else {}
    for module in stages.values() if isinstance(stages, Mapping) else stages:
        found = split_metadata(module, "tied")
        if isinstance(found, tuple) and all(isinstance(tied, Mapping) for tied in found):  # not unrelated
            known += [dict(tied) for tied in found]
    homes: dict[nn.Parameter, dict[int, str]] = {}
    for stage in sorted(numbered):
        for name, parameter in named_parameters(numbered[stage]):
            homes.setdefault(parameter, {}).setdefault(stage, name)
    known += [tied for tied in homes.values() if len(tied) > 1]
    one_name_each = [_one_name_per_stage(tied, problems) for tied in _join(known, numbered)]
    if problems:
        raise PipelineError("\n".join(problems))
    return tuple(sorted(one_name_each, key=lambda tied: tuple(tied.items())))


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
    """Return the first name in each stage; a stage cannot have two different parameters of one tied weight."""
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


class TiedWeights:
    """The tied weights of a pipeline, from the view of one rank."""

    def __init__(
        self,
        tied: Sequence[TiedNames],
        modules: Mapping[int, nn.Module],
        shards: Mapping[int, FsdpShards],
        schedule: Schedule,
        rank: int,
    ) -> None:
        self.all = tuple(tied)
        self._modules, self._shards = modules, shards
        rank_of_stage = schedule.placement.stage_to_rank
        self._owners: dict[tuple[int, str], tuple[nn.Module, str]]
        """By stage and name of a tied weight: the submodule that owns it, and its name there."""
        self._find_owners()
        for each in tied:
            own = self._own_stages(each)
            for stage in own[1:]:
                self._make_one(each, own[0], stage)
        self._rank, self._rank_of_stage = rank, rank_of_stage
        holders = [(each, tuple(sorted({rank_of_stage[stage] for stage in each}))) for each in tied]
        shared = [(each, ranks) for each, ranks in holders if len(ranks) > 1]
        self.between_ranks = tuple(each for each, _ in shared)
        """The tied weights that several ranks hold, which every rank must know."""
        self.rank_groups = sorted({ranks for _, ranks in shared})
        """All sets of ranks that share a weight, the same on every rank."""
        self._shared_by = [(each, ranks) for each, ranks in shared if self._own_stages(each)]
        """The tied weights of this rank that other ranks hold too, and all ranks that hold each."""
        self._earlier_gradients: dict[nn.Parameter, Tensor | None] = {}
        """Summed gradients of earlier steps, removed during a step on all ranks but the first."""
        self.unsummed = False
        """Whether there are gradients that no step has summed yet."""

    @property
    def counted_elsewhere(self) -> set[nn.Parameter]:
        """The parameters of this rank that another rank counts in the gradient norm."""
        return {parameter for tied, _, parameter in self._own() if not self._is_first(tied)}

    def _is_first(self, tied: TiedNames) -> bool:
        """Return whether this rank has the first stage of a tied weight."""
        return self._rank_of_stage[min(tied)] == self._rank

    def _find_owners(self) -> None:
        """Find the tied weights of this rank; repeated in every step, because submodules may be replaced."""
        wanted = dict.fromkeys((stage, tied[stage]) for tied in self.all for stage in self._own_stages(tied))
        self._owners = {
            (stage, name): (owner, own_name)
            for stage in dict.fromkeys(stage for stage, _ in wanted)
            for name, owner, own_name in owners(self._modules[stage])
            if (stage, name) in wanted
        }
        if missing := [place for place in wanted if place not in self._owners]:
            raise PipelineError(
                "\n".join(
                    f"tied weight {name!r} of stage {stage}: there is no such parameter in the stage"
                    for stage, name in missing
                )
            )

    def _parameter(self, tied: TiedNames, stage: int) -> nn.Parameter:
        """The current parameter: sharding, for example, replaces it."""
        owner, own_name = self._owners[stage, tied[stage]]
        return owner.get_parameter(own_name)

    def _make_one(self, tied: TiedNames, first: int, second: int) -> None:
        """Make two stages of this rank hold the same parameter."""
        kept, other = self._parameter(tied, first), self._parameter(tied, second)
        if kept is other:
            return
        if _description(kept) != _description(other):
            raise PipelineError(
                f"tied weights differ in shape, dtype or placement: {tied[first]!r} of stage {first} is "
                f"{_description(kept)}, {tied[second]!r} of stage {second} is {_description(other)}"
            )
        if not torch.equal(local(kept), local(other)):
            raise PipelineError(_divergence(tied, [first, second]))
        if second in self._shards:
            self._shards[second].tie(other, self._shards[first], kept)
            return
        for module in self._modules[second].modules():
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if parameter is other:
                    setattr(module, name, kept)

    def descriptions(self) -> dict[str, str]:
        """What all ranks must agree on: shape, dtype and placement of each weight that this rank shares."""
        return {str(dict(tied)): ", ".join(_description(parameter)) for tied, _, parameter in self._own()}

    def _own(self) -> Iterator[tuple[TiedNames, tuple[int, ...], nn.Parameter]]:
        for tied, ranks in self._shared_by:
            yield tied, ranks, self._parameter(tied, self._own_stages(tied)[0])

    def _own_stages(self, tied: TiedNames) -> list[int]:
        return [stage for stage in tied if stage in self._modules]

    def begin(self, communicator: Communicator | None) -> None:
        """Before a step: check that all copies are equal; only the first rank keeps an earlier gradient."""
        self._find_owners()
        self._check_still_one()
        if communicator is None:
            return
        for tied, ranks, parameter in self._own():
            largest = partial(communicator.all_reduce, ranks=ranks, operation=dist.ReduceOp.MAX)
            if any(differing(checksum(parameter).reshape(1), largest)):
                raise PipelineError(_divergence(tied, sorted(tied)))
            if not self.unsummed and not self._is_first(tied):
                self._earlier_gradients[parameter], parameter.grad = parameter.grad, None

    def _check_still_one(self) -> None:
        """The stages of this rank must still hold one parameter, as when the pipeline was created."""
        for tied in self.all:
            own = self._own_stages(tied)
            replaced = [
                stage for stage in own[1:] if self._parameter(tied, stage) is not self._parameter(tied, own[0])
            ]
            if replaced:
                raise PipelineError(
                    f"tied weights are no longer one parameter: {_named(tied, (own[0], *replaced))} were "
                    "replaced after the pipeline was created, for example by load_state_dict(assign=True): "
                    "load without it, or create another pipeline"
                )

    def finish(self, communicator: Communicator | None, *, sums: bool) -> None:
        """After a step: sum the gradients over the ranks, unless a later step adds more."""
        self.unsummed = not sums and bool(self._shared_by)
        if communicator is not None and sums:
            for _, ranks, parameter in self._own():
                bucket = GradientBucket([parameter])
                bucket.unpack(communicator.all_reduce(bucket.pack(), ranks))
        self._earlier_gradients.clear()

    def drop(self) -> None:
        """After a failed step: restore the gradients of earlier steps."""
        for parameter, earlier in self._earlier_gradients.items():
            parameter.grad = earlier
        self._earlier_gradients.clear()
        self.unsummed = False


def _description(parameter: Tensor) -> tuple[str, ...]:
    """Shape, dtype, and placements of a DTensor."""
    shown = [str(list(parameter.shape)), str(parameter.dtype).removeprefix("torch.")]
    if is_dtensor(parameter):
        mesh = parameter.device_mesh
        shown += [f"placed {parameter.placements}", f"on a mesh of {list(mesh.shape)}"]
    return tuple(shown)


def _named(tied: TiedNames, stages: Sequence[int]) -> str:
    return " and ".join(f"{tied[stage]!r} of stage {stage}" for stage in stages)


def _divergence(tied: TiedNames, stages: Sequence[int]) -> str:
    return (
        f"tied weights have diverged: {_named(tied, stages)} must have the same values. Initialize them from "
        "the same seed or checkpoint on every rank, and train them with the same optimizer options"
    )
