"""The norm of all gradients of a pipeline, the same number on every rank, and clipping by it.

Every parameter gives the norm of its gradient once: a tied weight on the rank of its first stage only, a
sharded one after its parts on other ranks were added. The norm of these norms is the norm of all gradients:
the same arithmetic as in one process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import PipelineError
from penstock.runtime.dtensors import is_dtensor, local
from penstock.runtime.transport.communicator import Communicator

__all__ = ["clip_grad_norm", "sharing_groups"]


class _Named(NamedTuple):
    stage: int
    name: str
    parameter: nn.Parameter


def clip_grad_norm(
    modules: Mapping[int, nn.Module],
    counted_elsewhere: Collection[nn.Parameter],
    links: Communicator | None,
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; gives the norm they had."""
    named = _with_gradients(modules)
    counted = [each for each in named if each.parameter not in counted_elsewhere]
    norms = _norms([each.parameter for each in counted], norm_type)
    stages, everyone = _gathered([each.stage for each in counted], norms, links)
    total = torch.linalg.vector_norm(everyone, norm_type) if len(everyone) else torch.zeros(())
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        broken = sorted({stage for stage, norm in zip(stages, everyone) if not bool(torch.isfinite(norm))})
        names = [each.name for each, norm in zip(counted, norms) if not bool(torch.isfinite(norm))]
        where = f": those of stage {', '.join(map(str, broken))}" if broken else ""
        raise PipelineError(
            f"the norm of the gradients is {float(total)}, because some are not finite{where}"
            + (f" ({', '.join(names[:8])} on this rank)" if names else "")
        )
    _scale([each.parameter for each in named], max_norm, total)
    return total


def _with_gradients(modules: Mapping[int, nn.Module]) -> list[_Named]:
    """The parameters that have a gradient, each once, by stage."""
    found: dict[nn.Parameter, _Named] = {}
    for stage, module in sorted(modules.items()):
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                found.setdefault(parameter, _Named(stage, name, parameter))
    return list(found.values())


def _norms(parameters: Iterable[nn.Parameter], p: float) -> list[Tensor]:
    """The norm of each gradient, of all its parts."""
    gradients = [_complete(parameter.grad.detach()) for parameter in parameters if parameter.grad is not None]
    norms = [_norm(local(gradient), p) for gradient in gradients]
    by_group: dict[dist.ProcessGroup, list[int]] = {}
    for place, gradient in enumerate(gradients):
        for group in _groups_of_parts(gradient):
            by_group.setdefault(group, []).append(place)
    for group, places in by_group.items():  # a gradient in parts of parts is here twice
        added = _added(torch.stack([norms[place] for place in places]), p, group)
        for place, norm in zip(places, added):
            norms[place] = norm
    return norms


def _norm(part: Tensor, p: float) -> Tensor:
    """Of one part; a rank may have got none of the numbers, which is no reason to leave the others waiting."""
    if not part.numel() and not 0 <= p < torch.inf:
        return part.new_tensor(0.0 if p > 0 else torch.inf)
    norm: Tensor = torch.linalg.vector_norm(part, p)
    return norm


def _complete(gradient: Tensor) -> Tensor:
    """The gradient with its sums finished: those of sequence-parallel norms are spread over their ranks."""
    if not is_dtensor(gradient) or not any(placement.is_partial() for placement in gradient.placements):
        return gradient
    from torch.distributed.tensor import Replicate  # noqa: PLC0415 -- loaded by whoever made the DTensor

    placements = [Replicate() if each.is_partial() else each for each in gradient.placements]
    finished: Tensor = gradient.redistribute(placements=placements)
    return finished


def _groups_of_parts(gradient: Tensor) -> list[dist.ProcessGroup]:
    """The groups whose ranks hold different parts of a gradient."""
    if not is_dtensor(gradient):
        return []
    found = []
    for dimension, placement in enumerate(gradient.placements):
        if not placement.is_replicate():
            found.append(gradient.device_mesh.get_group(dimension))
    return found


def _added(norms: Tensor, p: float, group: dist.ProcessGroup) -> Tensor:
    """The norms of what the ranks of a group hold together."""
    if p in (torch.inf, -torch.inf):
        norms = norms.clone()
        dist.all_reduce(norms, dist.ReduceOp.MAX if p > 0 else dist.ReduceOp.MIN, group)
        return norms
    powers = norms.clone() if p == 0 else norms**p
    dist.all_reduce(powers, group=group)
    return powers if p == 0 else powers ** (1 / p)


def _gathered(stages: list[int], norms: list[Tensor], links: Communicator | None) -> tuple[list[int], Tensor]:
    """The norms of all parameters of the pipeline and the stages they are of, in the order of the stages."""
    mine = torch.stack([norm.to(norms[0].device) for norm in norms]).cpu() if norms else torch.zeros(0)
    if links is None:
        return stages, mine
    # every number fits into 64 bits with all its digits, and so does what it is
    about = torch.tensor([len(mine), _TYPES.index(mine.dtype)], dtype=torch.float64)
    abouts = links.all_gather(about)
    rows = torch.zeros(max(int(each[0]) for each in abouts), 2, dtype=torch.float64)
    rows[: len(mine), 0] = torch.tensor(stages, dtype=torch.float64)
    rows[: len(mine), 1] = mine.to(torch.float64)
    gathered = links.all_gather(rows)
    kept = torch.cat([row[: int(each[0])] for row, each in zip(gathered, abouts)])
    kept = kept[torch.argsort(kept[:, 0], stable=True)]
    types = [_TYPES[int(each[1])] for each in abouts if each[0]]
    widest = max(types, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)
    return kept[:, 0].to(torch.int64).tolist(), kept[:, 1].to(widest)


_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@torch.no_grad()
def _scale(parameters: Iterable[nn.Parameter], max_norm: float, total: Tensor) -> None:
    share = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_device.setdefault(parameter.grad.device, []).append(local(parameter.grad))
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, share.to(device))


def sharing_groups(modules: Iterable[nn.Module], data: Iterable[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    """The groups through which this rank reaches all others that work on the same stages.

    Those over which parameters are shared out, and those over which data is.
    """
    found = dict.fromkeys(data)
    for module in modules:
        for parameter in module.parameters():
            if is_dtensor(parameter):
                mesh = parameter.device_mesh
                found.update(dict.fromkeys(mesh.get_group(dimension) for dimension in range(mesh.ndim)))
    return list(found)
