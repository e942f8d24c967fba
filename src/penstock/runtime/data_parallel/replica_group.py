"""The ranks that train the same stages on other data, what they replicate, and their collectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock.arguments import listed, some
from penstock.errors import PipelineError
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.runtime.dtensors import is_dtensor, local
from penstock.runtime.torch_internals.data_parallel import FsdpShards, has_communication_hooks, wrapper_of
from penstock.runtime.torch_internals.modules import attributes_set
from penstock.runtime.transport.process_groups import Group, process_group
from penstock.runtime.transport.transport_errors import transport_errors, wait


class ReplicatedParameter(NamedTuple):
    """A parameter, or a shard of one, that other ranks hold as well."""

    name: str
    parameter: nn.Parameter
    group: dist.ProcessGroup
    """The ranks that hold it."""


def checksum(tensor: Tensor) -> Tensor:
    """Return an integer that changes when any bit of the local tensor changes, except for rare collisions."""
    values = local(tensor.detach()).contiguous().reshape(-1)
    if not values.numel():
        return torch.zeros((), dtype=torch.int64, device=values.device)
    if values.is_complex():
        values = torch.view_as_real(values)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    return values.view(integer).sum(dtype=torch.int64) & (2**62 - 1)  # so that it can be negated


def differing(checksums: Tensor, all_reduce_max: Callable[[Tensor], Tensor]) -> list[bool]:
    """Return which checksums differ between ranks; `all_reduce_max` takes the maximum over the ranks."""
    largest, smallest = all_reduce_max(torch.stack([checksums, -checksums])).tolist()
    return [high != -low for high, low in zip(largest, smallest)]


def require_equal_replicas(replicated: Iterable[ReplicatedParameter]) -> None:
    """Raise if replicas hold different values: averaged gradients would not train one model then."""
    by_group: dict[dist.ProcessGroup, list[ReplicatedParameter]] = {}
    for each in replicated:
        by_group.setdefault(each.group, []).append(each)
    different = []
    for group, parameters in by_group.items():
        checksums = torch.stack([checksum(each.parameter) for each in parameters])
        differs = differing(checksums, partial(_all_reduce_max, group=group))
        different += [each.name for each, is_different in zip(parameters, differs) if is_different]
    if different:
        raise PipelineError(
            f"replicas must hold the same values, but those of {some(different)} differ: start every replica "
            "from the same seed or checkpoint"
        )


def _all_reduce_max(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    with transport_errors():
        dist.all_reduce(values, dist.ReduceOp.MAX, group)
    return values


class GradientBucket:
    """The gradients of weights of one dtype and device in one flat tensor, for one collective.

        | gradient of a | gradient of b | ... | 1 if a has one | 1 if b has one | ... |

    A weight without a gradient counts as zeros. It has no gradient afterwards either, unless another rank had
    one: an optimizer with weight decay changes a weight whose gradient is zero, and skips one without one.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = weights
        self._sizes = [local(weight).numel() for weight in weights]

    def pack(self) -> Tensor:
        """Return the gradients, and a flag for each weight: whether it has one."""
        first = local(self._weights[0])
        gradients = map(_gradient_placed_as, self._weights)
        parts = [
            first.new_zeros(size) if gradient is None else local(gradient).detach().reshape(-1)
            for gradient, size in zip(gradients, self._sizes)
        ]
        present = [float(weight.grad is not None) for weight in self._weights]
        return torch.cat([*parts, first.new_tensor(present)])

    @torch.no_grad()
    def unpack(self, packed: Tensor) -> None:
        """Write the reduced gradients back to the weights."""
        *parts, present = packed.split([*self._sizes, len(self._weights)])  # type: ignore[no-untyped-call]
        for weight, part, is_present in zip(self._weights, parts, (present != 0).tolist()):
            if not is_present:
                continue
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            values = local(weight.grad)
            values.copy_(part.view(values.shape))


def _gradient_placed_as(weight: Tensor) -> Tensor | None:
    """Return the gradient with the placements of its weight: only then can ranks add their local parts."""
    grad = weight.grad
    if grad is not None and grad.layout != torch.strided:
        raise PipelineError(
            f"a weight of shape {list(weight.shape)} has a sparse gradient, which cannot be summed over ranks: "
            "create its layer with sparse=False"
        )
    if is_dtensor(grad) and is_dtensor(weight) and grad.placements != weight.placements:
        with torch.no_grad():
            weight.grad = grad.redistribute(placements=weight.placements)
    return weight.grad


_Wrappers: TypeAlias = Mapping[int, Sequence[DistributedDataParallel]]
"""The DistributedDataParallel wrappers by stage, those of the composable `replicate` included."""


def _find_wrappers(modules: Mapping[int, nn.Module]) -> tuple[_Wrappers, list[tuple[Any, str, bool]]]:
    """Return the wrappers, and the attributes that control reductions with the values that disable them."""
    wrappers: dict[int, list[DistributedDataParallel]] = {stage: [] for stage in modules}
    switches: list[tuple[Any, str, bool]] = []
    for stage, module in modules.items():
        for part in module.modules():
            wrapper, own_switches = wrapper_of(part)
            switches += own_switches
            if isinstance(wrapper, DistributedDataParallel):
                _check_supported(wrapper, stage)
                switches.append((wrapper, "require_backward_grad_sync", False))
                wrappers[stage].append(wrapper)
    return wrappers, switches


def _check_supported(wrapper: DistributedDataParallel, stage: int) -> None:
    if has_communication_hooks(wrapper):
        raise PipelineError(
            f"stage {stage} is wrapped in DistributedDataParallel with a communication hook, which would never "
            "run: a pipeline reduces the gradients of a stage itself, once per step"
        )
    if wrapper.static_graph:
        raise PipelineError(
            f"stage {stage} is wrapped in DistributedDataParallel with static_graph=True, which always reduces "
            "after the first backward: remove it, a pipeline reduces once per step in any case"
        )


Groups = tuple[dist.ProcessGroup, ...]
_Buckets: TypeAlias = dict[int, list[tuple[GradientBucket, dist.ProcessGroup]]]


class ReplicaLayout(NamedTuple):
    """Which parameters of a rank are replicated, over which process groups, and reduced in which buckets."""

    parameters: dict[nn.Parameter, bool]
    """The parameters that FSDP does not shard, and whether each is trained."""
    replicated: list[ReplicatedParameter]
    """The parameters that other ranks hold as well."""
    buckets: _Buckets
    """By stage: the buckets that its REDUCE_GRAD reduces, and over which group."""


def unsharded(modules: Iterable[nn.Module], shards: Mapping[int, FsdpShards]) -> dict[nn.Parameter, bool]:
    """Return the parameters that FSDP does not shard, and whether each is trained."""
    sharded = {parameter for each in shards.values() for parameter in each.parameters}
    everything = (parameter for module in modules for parameter in module.parameters())
    return {parameter: parameter.requires_grad for parameter in everything if parameter not in sharded}


def find_layout(
    modules: Mapping[int, nn.Module],
    shards: Mapping[int, FsdpShards],
    wrappers: _Wrappers,
    replicas: dist.ProcessGroup | None,
    reduction_order: list[int],
) -> ReplicaLayout:
    """Find what is reduced with whom; a tied weight is reduced with the last of its stages."""
    parameters = unsharded(modules.values(), shards)
    replicated = [
        ReplicatedParameter(*each) for stage_shards in shards.values() for each in stage_shards.replicated()
    ]
    homes: dict[nn.Parameter, tuple[int, dist.ProcessGroup]] = {}
    problems = []
    for stage in sorted(modules, key=reduction_order.index if reduction_order else None):
        wrapped = {each: ddp.process_group for ddp in wrappers[stage] for each in ddp.parameters()}
        unreplicated = []
        for name, parameter in modules[stage].named_parameters():
            if parameter not in parameters:  # it is sharded
                continue
            if (holders := wrapped.get(parameter, replicas)) is not None:
                replicated.append(ReplicatedParameter(f"{name} of stage {stage}", parameter, holders))
                homes[parameter] = stage, holders
            elif parameter.requires_grad:
                unreplicated.append(name)
        if unreplicated and (stage in shards or wrapped):
            problems.append(f"  stage {stage}: {some(unreplicated)}")
    if problems:
        raise PipelineError(
            "these parameters would be trained on the data of one rank alone, while others in their stage are "
            "replicated or sharded; wrap the whole stage module, or pass replicas=:\n" + "\n".join(problems)
        )
    return ReplicaLayout(parameters, replicated, _buckets_by_stage(homes))


def _buckets_by_stage(homes: Mapping[nn.Parameter, tuple[int, dist.ProcessGroup]]) -> _Buckets:
    together: dict[tuple[int, dist.ProcessGroup, torch.dtype, torch.device], list[Tensor]] = {}
    for parameter, (stage, group) in homes.items():
        if parameter.requires_grad:
            together.setdefault((stage, group, parameter.dtype, parameter.device), []).append(parameter)
    buckets: _Buckets = {}
    for (stage, group, *_), weights in together.items():
        buckets.setdefault(stage, []).append((GradientBucket(weights), group))
    return buckets


def data_parallel_groups(
    layout: ReplicaLayout, shards: Mapping[int, FsdpShards], replicas: dist.ProcessGroup | None
) -> Groups:
    """Return the process groups over which the data is distributed; all stages of the rank must agree."""
    sharded = (groups for each in shards.values() for groups in each.data_groups())
    reduced = ((group,) for buckets in layout.buckets.values() for _, group in buckets)
    found: dict[tuple[int, ...], Groups] = {}
    for groups in (*sharded, *reduced):
        ranks = {rank for group in groups for rank in dist.get_process_group_ranks(group)}
        found.setdefault(tuple(sorted(ranks)), groups)
    if replicas is not None:
        members = set(dist.get_process_group_ranks(replicas))
        if missing := sorted({rank for ranks in found for rank in ranks} - members):
            raise PipelineError(
                f"replicas= has world ranks {listed(sorted(members))}, but stages are also sharded or "
                f"replicated with rank {listed(missing)}: replicas= names all ranks that train the same "
                "stages; to replicate shards, pass a 2D mesh to fully_shard"
            )
        return (replicas,)
    if len(found) > 1:
        different = "; ".join(f"world ranks {listed(ranks)}" for ranks in found)
        raise PipelineError(
            f"the stages of this rank are replicated over different ranks ({different}): pass replicas= to "
            "name the ranks that the data is distributed over"
        )
    return next(iter(found.values()), ())


class ReplicaGroup:
    """The ranks that train the stages of one rank on other data, and the collectives that they run in a step.

    A stage may be replicated in three ways, and a rank may mix them:

        fully_shard, replicate   FSDP2 holds a shard of each parameter; see `FsdpShards`
        DistributedDataParallel  its own reductions are disabled, and the pipeline reduces the whole stage
        `replicas=` of Pipeline  the same for modules without a wrapper

    Gradients are averaged over the replicas once per step, at REDUCE_GRAD.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        shards: Mapping[int, FsdpShards],
        replicas: Group,
        schedule: Schedule,
        rank: int,
    ) -> None:
        self.shards = shards
        """The FSDP shards by stage."""
        self._modules = modules
        self._replicas = process_group(replicas, "replicas=", "dp")
        firsts = [step.parts[0] for step in schedule.ranks[rank]]
        self._reduction_order = [first.stage for first in firsts if first.kind is Kind.REDUCE_GRAD]
        self._wrappers, self._switches = _find_wrappers(modules)
        self._pending: dict[int, list[tuple[GradientBucket, Tensor, dist.Work]]] = {}
        """By stage: the buckets whose reduction has begun."""
        self._unfinished: list[dist.Work] = []
        """The reductions that the last failed step had begun."""
        self._reduced: set[int] = set()
        """The stages whose reduction has begun in this step."""
        self.reduces = True
        """Whether this step reduces gradients; if not, a later step does."""
        self.unreduced = False
        """Whether there are gradients that no step has reduced yet."""
        self._are_equal = False
        """Whether the replicas were found to hold the same values."""
        self._find_layout()
        self.groups = data_parallel_groups(self._layout, shards, self._replicas)
        """The process groups over which the data is distributed, nested; empty without data parallelism."""
        self.count = math.prod(group.size() for group in self.groups)
        """The number of ranks that train the same stages."""

    def _find_layout(self) -> None:
        self._are_equal = False
        self._layout = find_layout(
            self._modules, self.shards, self._wrappers, self._replicas, self._reduction_order
        )

    def refresh(self) -> None:
        """Before a step: reshard all parameters, and find replaced or unfrozen ones."""
        for shards in self.shards.values():
            shards.reshard()  # a forward outside of the pipeline may have left stale unsharded parameters
        if self.groups and unsharded(self._modules.values(), self.shards) != self._layout.parameters:
            self._find_layout()

    def begin(self, *, training: bool, reduces: bool) -> None:
        """Begin a step: compare the replicas if they have parameters that were not compared yet."""
        self.reduces = reduces
        self._reduced.clear()
        self._unfinished.clear()
        if training and not self._are_equal:  # eval needs no other replica
            require_equal_replicas(self._layout.replicated)
            self._are_equal = True

    def sample(self, step: int) -> tuple[tuple[int, ...], str, str] | None:
        """Return one of the parameters that replicas hold, another one in each step; None if there are none.

        It has the world ranks that hold it, its name, and its checksum, or that this step compares all of them.
        """
        if not (replicated := self._layout.replicated):
            return None
        chosen = replicated[step % len(replicated)]
        value = f"checksum {int(checksum(chosen.parameter))}" if self._are_equal else "new or replaced"
        return tuple(dist.get_process_group_ranks(chosen.group)), chosen.name, value

    @contextmanager
    def scheduled(self) -> Iterator[None]:
        """Let only the actions of the schedule gather, reshard and reduce in here; DDP and FSDP do not."""
        with ExitStack() as entered:
            for shards in self.shards.values():
                entered.enter_context(shards.scheduled())
            entered.enter_context(attributes_set(self._switches))
            yield

    def reduces_stage(self, stage: int) -> bool:
        """Return whether REDUCE_GRAD has anything to do for a stage."""
        return stage in self.shards or stage in self._layout.buckets

    def reduce(self, stage: int) -> None:
        """REDUCE_GRAD: begin to average the gradients of a stage."""
        if not self.reduces or stage in self._reduced:
            return
        self._reduced.add(stage)
        if stage in self.shards:
            self.shards[stage].reduce()
        for bucket, group in self._layout.buckets.get(stage, ()):
            packed = bucket.pack().div_(group.size())  # before the sum, which may overflow
            work = dist.all_reduce(packed, group=group, async_op=True)
            assert work is not None
            self._pending.setdefault(stage, []).append((bucket, packed, work))

    def wait(self, stage: int) -> None:
        """WAIT_REDUCE_GRAD: wait for the reduction of a stage; the compute stream of a device does."""
        for bucket, packed, work in self._pending.pop(stage, ()):
            wait(work)
            bucket.unpack(packed)
        if stage in self.shards:
            self.shards[stage].wait()

    def finish(self, *, trained: bool) -> None:
        """The end of a step: start the reductions that the schedule leaves out, and wait for all."""
        if trained and self.reduces:
            for stage in self._layout.buckets:
                self.reduce(stage)
        for shards in self.shards.values():
            shards.finish(reduces=trained and self.reduces)
        for stage in list(self._pending):
            self.wait(stage)
        if trained:
            self.unreduced = not self.reduces and self.count > 1

    def drop(self) -> None:
        """After a failed step: forget its pending reductions and its unreduced gradients."""
        self._unfinished = self._pending_works
        self._pending.clear()
        self.unreduced = False
        for shards in self.shards.values():
            shards.drop()

    @property
    def _pending_works(self) -> list[dist.Work]:
        return [work for begun in list(self._pending.values()) for _, _, work in begun]

    @property
    def has_unfinished(self) -> bool:
        """Return whether a reduction has begun that other replicas have not joined.

        If the step fails here, they would join it with the gradients of the next step.
        """
        works = [*self._unfinished, *self._pending_works]
        return not all(work.is_completed() for work in works)

    def total(self, values: Tensor, device: torch.device) -> Tensor:
        """Return the sum of these values over all replicas."""
        if not self.groups:
            return values
        moved = values.to(device)
        with transport_errors():
            for group in self.groups:
                dist.all_reduce(moved, group=group)
        return moved.to(values.device)
