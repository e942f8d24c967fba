"""The other ranks that train the same stages on other data, and what this rank does together with them.

A stage may be replicated in three ways, and a rank may mix them:

    fully_shard, replicate   FSDP2 holds a part of each parameter; see `Shards`
    DistributedDataParallel  its own reductions are held back, and one for the whole stage is made
    `replicas=` of Pipeline  the same for modules that are wrapped in nothing

Gradients are averaged over the replicas, once in a step, at REDUCE_GRAD.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock.arguments import listed, some
from penstock.errors import PipelineError
from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.runtime.data_parallel.fsdp import Shards
from penstock.runtime.data_parallel.gradient_buckets import Row, differing, mark_of, rows_of
from penstock.runtime.transport.process_groups import Group, process_group

__all__ = ["Replication"]

Groups = tuple[dist.ProcessGroup, ...]


class Replication:
    """How the stages of one rank are replicated."""

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        shards: Mapping[int, Shards],
        replicas: Group,
        schedule: Schedule,
        rank: int,
    ) -> None:
        given = process_group(replicas, "replicas=", "dp")
        self.shards = shards
        """The sharded parameters by stage."""
        self._modules, self._given = modules, given
        self._order = _last_reduced(schedule, rank)
        self._switches: list[tuple[Any, str, bool]] = []
        self._wrappers = {stage: list(self._wrappers_in(stage)) for stage in modules}
        self._rows: dict[int, list[tuple[Row, dist.ProcessGroup]]]
        self._under_way: list[tuple[Row, Tensor, dist.Work]] = []
        self._started: set[int] = set()
        self.reduces = True
        """Whether the step at hand reduces gradients; else it adds to what a later one will reduce."""
        self.unreduced = False
        """Whether there are gradients that no step has reduced yet."""
        self._known: dict[nn.Parameter, bool]
        self._copies: list[tuple[str, nn.Parameter, dist.ProcessGroup]]
        """What other ranks hold as well: where, and who does."""
        self._same = False
        """Whether those were found to be the same everywhere."""
        self._find_replicated()
        self.groups = self._data_groups(given)
        """The process groups over which the data is shared out, one inside the other; none if it is not."""
        self.count = math.prod(group.size() for group in self.groups)
        """How many ranks train the same stages."""

    # --- what is replicated, and how ---------------------------------------------------------------

    def _find_replicated(self) -> None:
        """What is reduced with whom; done again when parameters were replaced, frozen or unfrozen."""
        self._known, self._same = self._parameters_now(), False
        self._copies = [copy for shards in self.shards.values() for copy in shards.copies()]
        homes: dict[nn.Parameter, tuple[int, dist.ProcessGroup]] = {}
        faults = []
        for stage in sorted(self._modules, key=self._order.index if self._order else None):
            wrapped = {
                p: wrapper.process_group for wrapper in self._wrappers[stage] for p in wrapper.parameters()
            }
            alone = []
            for name, parameter in self._modules[stage].named_parameters():
                group = wrapped.get(parameter, self._given)
                if parameter not in self._known:  # then it is sharded
                    continue
                if group is not None:
                    self._copies.append((f"{name} of stage {stage}", parameter, group))
                    homes[parameter] = stage, group  # a tied weight is reduced with its last stage
                elif parameter.requires_grad:
                    alone.append(name)
            if alone and (stage in self.shards or wrapped):
                faults.append(f"  stage {stage}: {some(alone)}")
        if faults:
            raise PipelineError(
                "these parameters would be trained on the data of one rank alone, while others in their stage "
                "are replicated or sharded; wrap the stage's own module, or give replicas=:\n"
                + "\n".join(faults)
            )
        self._rows = _rows_by_stage(homes)

    def _parameters_now(self) -> dict[nn.Parameter, bool]:
        """Those that are not sharded, and which of them are trained."""
        sharded = {parameter for shards in self.shards.values() for parameter in shards.parameters}
        everyone = (parameter for module in self._modules.values() for parameter in module.parameters())
        return {parameter: parameter.requires_grad for parameter in everyone if parameter not in sharded}

    def _refuse_different(self) -> None:
        """Averaged gradients train the replicas of a model only if these hold the same numbers."""
        by_group: dict[dist.ProcessGroup, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter, group in self._copies:
            by_group.setdefault(group, []).append((name, parameter))
        different = []
        for group, named in by_group.items():
            marks = torch.stack([mark_of(parameter) for _, parameter in named])
            differs = differing(marks, partial(_largest, group=group))
            different += [name for (name, _), is_different in zip(named, differs) if is_different]
        if different:
            raise PipelineError(
                f"replicas must hold the same numbers, but those of {some(different)} differ: start every "
                "replica from the same seed or checkpoint"
            )
        self._same = True

    def _wrappers_in(self, stage: int) -> Iterator[DistributedDataParallel]:
        """Those of DistributedDataParallel, and their switches that hold reductions back."""
        composable = sys.modules.get("torch.distributed._composable.replicate")
        for part in self._modules[stage].modules():
            wrapper = part
            if composable is not None and isinstance(part, composable.DDP):  # a wrapper beside the module
                state = composable.replicate.state(part)
                if state._init_args:  # noqa: SLF001 -- torch leaves it until the first forward
                    state.lazy_init()
                wrapper = state._ddp  # noqa: SLF001
                self._switches.append((state, "_no_sync", True))  # it sets the wrapper's own at every forward
            if isinstance(wrapper, DistributedDataParallel):
                _refuse_what_reduces_alone(wrapper, stage)
                self._switches.append((wrapper, "require_backward_grad_sync", False))
                yield wrapper

    def _data_groups(self, given: dist.ProcessGroup | None) -> Groups:
        """Over whom batches are shared out; all stages must say the same."""
        found: dict[tuple[int, ...], Groups] = {}
        for groups in (
            *(groups for shards in self.shards.values() for groups in shards.data_groups()),
            *((group,) for rows in self._rows.values() for _, group in rows),
        ):
            found.setdefault(_ranks_of(groups), groups)
        if given is not None:
            everyone = set(dist.get_process_group_ranks(given))
            if strangers := sorted({rank for ranks in found for rank in ranks} - everyone):
                raise PipelineError(
                    f"replicas= has world ranks {listed(sorted(everyone))}, but stages are sharded or "
                    f"replicated with rank {listed(strangers)} as well: replicas= names all ranks that train "
                    "the same stages; to replicate shards, give fully_shard a mesh of two dimensions"
                )
            return (given,)
        if len(found) > 1:
            told = "; ".join(f"world ranks {listed(ranks)}" for ranks in found)
            raise PipelineError(
                f"the stages of this rank are replicated over different ranks ({told}): say with replicas= "
                "which ranks share out the data"
            )
        return next(iter(found.values()), ())

    # --- in a step ---------------------------------------------------------------------------------

    def begin(self, *, training: bool, reduces: bool) -> None:
        """Before a step: parameters are sharded, what is replicated is known, and the replicas are the same."""
        self.reduces = reduces
        self._started.clear()
        for shards in self.shards.values():
            shards.reshard()  # a forward outside of the pipeline may have left whole parameters, old by now
        if self.groups and self._parameters_now() != self._known:
            self._find_replicated()
        if training and not self._same:  # eval needs nobody else
            self._refuse_different()

    @contextmanager
    def driven(self) -> Iterator[None]:
        """Reductions of wrappers and FSDP are held back in here."""
        before = [getattr(of, switch) for of, switch, _ in self._switches]
        with ExitStack() as held:
            for shards in self.shards.values():
                held.enter_context(shards.driven())
            try:
                for of, switch, value in self._switches:
                    setattr(of, switch, value)
                yield
            finally:
                for (of, switch, _), value in zip(self._switches, before):
                    setattr(of, switch, value)

    def has(self, kind: Kind, stage: int) -> bool:
        """Whether an action of this kind has anything to do for a stage."""
        return stage in self.shards or (kind is Kind.REDUCE_GRAD and stage in self._rows)

    def reduce(self, stage: int) -> None:
        """REDUCE_GRAD: begin to average the gradients of a stage."""
        if not self.reduces or stage in self._started:
            return
        self._started.add(stage)
        if stage in self.shards:
            self.shards[stage].reduce()
        for row, group in self._rows.get(stage, ()):
            numbers = row.packed().div_(group.size())  # before they are added, because the sum may be too large
            work = dist.all_reduce(numbers, group=group, async_op=True)
            assert work is not None
            self._under_way.append((row, numbers, work))

    def finish(self, *, trained: bool) -> None:
        """The end of a step: what was begun is waited for, what the schedule left out is done."""
        if trained and self.reduces:
            for stage in self._rows:
                self.reduce(stage)
        for shards in self.shards.values():
            shards.finish(reduces=trained and self.reduces)
        for row, numbers, work in self._under_way:
            work.wait()
            row.unpack(numbers)
        self._under_way.clear()
        if trained:
            self.unreduced = not self.reduces and self.count > 1

    def drop(self) -> None:
        """A step failed."""
        self._under_way.clear()
        self.unreduced = False
        for shards in self.shards.values():
            shards.drop()

    def total(self, numbers: Tensor, device: torch.device) -> Tensor:
        """The sum of these numbers over all replicas."""
        if not self.groups:
            return numbers
        moved = numbers.to(device)
        for group in self.groups:
            dist.all_reduce(moved, group=group)
        return moved.to(numbers.device)


def _rows_by_stage(
    homes: Mapping[nn.Parameter, tuple[int, dist.ProcessGroup]],
) -> dict[int, list[tuple[Row, dist.ProcessGroup]]]:
    """The parameters that are trained, in rows by the stage they are reduced with."""
    by_place: dict[tuple[int, dist.ProcessGroup], list[nn.Parameter]] = {}
    for parameter, home in homes.items():
        if parameter.requires_grad:
            by_place.setdefault(home, []).append(parameter)
    found: dict[int, list[tuple[Row, dist.ProcessGroup]]] = {}
    for (stage, group), parameters in by_place.items():
        found.setdefault(stage, []).extend((row, group) for row in rows_of(parameters))
    return found


def _largest(numbers: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group)
    return numbers


def _refuse_what_reduces_alone(wrapper: DistributedDataParallel, stage: int) -> None:
    if wrapper._comm_hooks:  # noqa: SLF001
        raise PipelineError(
            f"stage {stage} is wrapped in DistributedDataParallel with a communication hook, which would not "
            "be called: a pipeline reduces the gradients of a stage at once"
        )
    if wrapper.static_graph:
        raise PipelineError(
            f"stage {stage} is wrapped in DistributedDataParallel with static_graph=True, which reduces after "
            "the first backward whatever it is told: leave that out, a pipeline reduces once in any case"
        )


def _last_reduced(schedule: Schedule, rank: int) -> list[int]:
    """The stages of a rank in the order of their REDUCE_GRAD; empty if there are none."""
    return [step.parts[0].stage for step in schedule.ranks[rank] if step.parts[0].kind is Kind.REDUCE_GRAD]


def _ranks_of(groups: Groups) -> tuple[int, ...]:
    """All ranks that can be reached through these groups, one after the other, as far as this rank knows."""
    return tuple(sorted({rank for group in groups for rank in dist.get_process_group_ranks(group)}))
