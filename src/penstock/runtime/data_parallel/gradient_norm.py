"""The norm of all gradients of a pipeline, equal on every rank, and gradient clipping.

Every parameter contributes the norm of its gradient once: a tied weight on the rank of its first stage only, a
sharded one after a reduction over its shards. The norm of these norms is the norm of all gradients: the same
arithmetic as in one process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import PipelineError
from penstock.runtime.dtensors import is_dtensor, local
from penstock.runtime.torch_internals.autograd import scale_all
from penstock.runtime.transport.communicator import Communicator
from penstock.runtime.transport.transport_errors import transport_errors


def clip_grad_norm(
    modules: Mapping[int, nn.Module],
    counted_elsewhere: Collection[nn.Parameter],
    communicator: Communicator | None,
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; return the norm before scaling."""
    gradients: dict[nn.Parameter, tuple[int, str, Tensor]] = {}
    for stage, module in sorted(modules.items()):
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                gradients.setdefault(parameter, (stage, name, parameter.grad))
    counted = [each for parameter, each in gradients.items() if parameter not in counted_elsewhere]
    norms = _norms([gradient for _, _, gradient in counted], norm_type)
    stages, all_norms = _all_gather([stage for stage, _, _ in counted], norms, communicator)
    total = torch.linalg.vector_norm(all_norms, norm_type) if len(all_norms) else torch.zeros(())
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        nonfinite = sorted({stage for stage, norm in zip(stages, all_norms) if not bool(torch.isfinite(norm))})
        names = [name for (_, name, _), norm in zip(counted, norms) if not bool(torch.isfinite(norm))]
        where = f": those of stage {', '.join(map(str, nonfinite))}" if nonfinite else ""
        raise PipelineError(
            f"the norm of the gradients is {float(total)}, because some gradients are not finite{where}"
            + (f" ({', '.join(names[:8])} on this rank)" if names else "")
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for _, _, gradient in gradients.values():
        by_device.setdefault(gradient.device, []).append(local(gradient))
    with torch.no_grad():
        for device, on_device in by_device.items():
            scale_all(on_device, factor.to(device))
    return total


def _norms(given: Iterable[Tensor], p: float) -> list[Tensor]:
    """Return the norm of each gradient over all its shards."""
    gradients = [_without_partials(gradient.detach()) for gradient in given]
    norms = [_norm(local(gradient), p) for gradient in gradients]
    by_group: dict[dist.ProcessGroup, list[int]] = {}
    for place, gradient in enumerate(gradients):
        if is_dtensor(gradient):
            for dimension, placement in enumerate(gradient.placements):
                if not placement.is_replicate():
                    by_group.setdefault(gradient.device_mesh.get_group(dimension), []).append(place)
    for group, places in by_group.items():  # a gradient sharded over two groups is reduced twice
        reduced = _reduce_norms(torch.stack([norms[place] for place in places]), p, group)
        for place, norm in zip(places, reduced):
            norms[place] = norm
    return norms


def _norm(shard: Tensor, p: float) -> Tensor:
    """Return the norm of one shard; an empty one has a neutral norm, so that its rank joins the collectives."""
    if not shard.numel() and not 0 <= p < torch.inf:
        return shard.new_tensor(0.0 if p > 0 else torch.inf)
    norm: Tensor = torch.linalg.vector_norm(shard, p)
    return norm


def _without_partials(gradient: Tensor) -> Tensor:
    """Return the gradient with partial sums reduced: sequence-parallel norms leave them partial."""
    if not is_dtensor(gradient) or not any(placement.is_partial() for placement in gradient.placements):
        return gradient
    from torch.distributed.tensor import Replicate  # noqa: PLC0415 -- already loaded, because there is a DTensor

    placements = [Replicate() if each.is_partial() else each for each in gradient.placements]
    with transport_errors():
        reduced: Tensor = gradient.redistribute(placements=placements)
    return reduced


def _reduce_norms(norms: Tensor, p: float, group: dist.ProcessGroup) -> Tensor:
    """Return the norms over all ranks of a group."""
    operation = {torch.inf: dist.ReduceOp.MAX, -torch.inf: dist.ReduceOp.MIN}.get(p, dist.ReduceOp.SUM)
    is_power = p not in (0, torch.inf, -torch.inf)
    reduced = norms**p if is_power else norms.clone()
    with transport_errors():
        dist.all_reduce(reduced, operation, group)
    return reduced ** (1 / p) if is_power else reduced


def _all_gather(
    stages: list[int], norms: list[Tensor], communicator: Communicator | None
) -> tuple[list[int], Tensor]:
    """Return the stages and norms of all parameters of the pipeline, in the order of the stages."""
    mine = torch.stack([norm.to(norms[0].device) for norm in norms]).cpu() if norms else torch.zeros(0)
    if communicator is None:
        return stages, mine
    # float64 represents every norm, count and index exactly
    header = torch.tensor([len(mine), _DTYPES.index(mine.dtype)], dtype=torch.float64)
    headers = communicator.all_gather(header)
    entries = torch.zeros(max(int(each[0]) for each in headers), 2, dtype=torch.float64)
    entries[: len(mine), 0] = torch.tensor(stages, dtype=torch.float64)
    entries[: len(mine), 1] = mine.to(torch.float64)
    gathered = communicator.all_gather(entries)
    kept = torch.cat([rank_entries[: int(each[0])] for rank_entries, each in zip(gathered, headers)])
    kept = kept[torch.argsort(kept[:, 0], stable=True)]
    dtypes = [_DTYPES[int(each[1])] for each in headers if each[0]]
    widest = max(dtypes, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)
    return kept[:, 0].to(torch.int64).tolist(), kept[:, 1].to(widest)


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def model_groups(modules: Iterable[nn.Module], data: Iterable[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    """Return the process groups, of meshes and of data, that reach all ranks of the same stages."""
    found = dict.fromkeys(data)
    for module in modules:
        for parameter in module.parameters():
            if is_dtensor(parameter):
                mesh = parameter.device_mesh
                found.update(dict.fromkeys(mesh.get_group(dimension) for dimension in range(mesh.ndim)))
    return list(found)
