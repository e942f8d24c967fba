"""The reference run: the user's model trained in one process without a pipeline, stored in a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from penstock.errors import PipelineError
from penstock.ir.graph import StageGraph
from penstock.runtime.execution.batcher import Batcher
from penstock.runtime.verification.user_function import Source
from penstock.runtime.verification.user_model import UserModel, load_user_model

__all__ = ["Reference", "named_parameters", "optimizer_for", "relative_error", "train_reference"]

_FLOOR = 1e-3  # as a share of the largest value of all tensors: errors are relative to at least that
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def train_reference(source: Source, steps: int, graph: StageGraph, microbatches: int, file: Path) -> None:
    """On rank 0: train without a pipeline and write losses, norms, gradients and parameters to a file."""
    user_model = load_user_model(source, graph)
    if dist.get_rank():
        return
    fingerprint, modules = user_model.fingerprint, user_model.modules
    batcher = Batcher(microbatches)
    args, kwargs = batcher.split_arguments(user_model.args, user_model.kwargs)
    batches = list(zip(args, kwargs, batcher.split_target(user_model.target)))
    optimizer = optimizer_for(modules.parameters())
    tensors: dict[str, Tensor] = {}
    losses, norms, random_state = [], [], torch.get_rng_state()
    for step in range(steps):
        losses.append(_accumulate_gradients(user_model, batches))
        gradients = [weight.grad for weight in modules.parameters() if weight.grad is not None]
        norms.append(float(get_total_norm(gradients)))
        for name, weight in named_parameters(modules):
            if weight.grad is not None:
                tensors[f"gradient {step} {name}"] = _copy(weight.grad)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    tensors |= {f"parameter {name}": _copy(weight) for name, weight in named_parameters(modules)}
    header = {
        "fingerprint": fingerprint,
        "losses": losses,
        "norms": norms,
        "draws": not torch.equal(random_state, torch.get_rng_state()),
        "largest": [_largest(tensors, f"gradient {step} ") for step in range(steps)],
        "largest parameter": _largest(tensors, "parameter "),
        "tolerance": _tolerance(modules),
    }
    from safetensors.torch import save_file  # noqa: PLC0415 -- an extra

    save_file(tensors, file, {"header": json.dumps(header)})


def _accumulate_gradients(user_model: UserModel, batches: list[tuple[Any, Any, Any]]) -> float:
    """Forward and backward of all microbatches; gives the mean loss, weighted by tokens if they are counted."""
    count = user_model.tokens
    weights = [1.0 if count is None else float(count(target)) for _, _, target in batches]
    total = 0.0
    for weight, (args, kwargs, target) in zip(weights, batches):
        loss = user_model(args, kwargs, target) * (weight / sum(weights))
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def _tolerance(modules: nn.Module) -> float:
    """The default tolerance, for the least precise dtype of the parameters."""
    return max((_TOLERANCES.get(p.dtype, 1e-4) for p in modules.parameters()), default=1e-4)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def named_parameters(modules: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters with all their names: a tied weight has several."""
    for name, weight in modules.named_parameters(remove_duplicate=False):
        yield name.removeprefix("model."), weight


def optimizer_for(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
    """SGD: an optimizer that divides by the size of gradients would amplify rounding errors."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.01, momentum=0.9) if trained else None


def _largest(tensors: Mapping[str, Tensor], prefix: str) -> float:
    return max((_max_abs(tensor) for name, tensor in tensors.items() if name.startswith(prefix)), default=0.0)


def _max_abs(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


class Reference:
    """The file of a reference run."""

    def __init__(self, file: Path) -> None:
        from safetensors import safe_open  # noqa: PLC0415 -- an extra

        opener: Any = safe_open  # it has no types
        self._file = opener(file, "pt")
        self.header: dict[str, Any] = json.loads(self._file.metadata()["header"])
        self._names = set(self._file.keys())

    def check_same_model(self, user_model: UserModel, group: dist.ProcessGroup) -> None:
        """Raise on all ranks if one has another model or batch than the reference."""
        fingerprints: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(fingerprints, user_model.fingerprint, group)
        if set(fingerprints) != {self.header["fingerprint"]}:
            raise PipelineError(
                "the function returns other weights or another batch each time it is called, so there is "
                "nothing to compare: seed its random generators. torch, numpy and random are seeded before "
                "it is called"
            )

    def gradient_error(self, step: int, name: str, gradient: Tensor | None) -> float:
        """The error of one gradient after the backward of a step."""
        return self._error(f"gradient {step} {name}", gradient, self.header["largest"][step])

    def parameter_error(self, name: str, parameter: Tensor) -> float:
        """The error of one parameter after all steps."""
        return self._error(f"parameter {name}", parameter, self.header["largest parameter"])

    def _error(self, name: str, tensor: Tensor | None, largest: float) -> float:
        if tensor is None or name not in self._names:
            return 0.0 if tensor is None and name not in self._names else inf
        expected = self._file.get_tensor(name).to(torch.float64)
        difference = _max_abs(tensor.detach().to(torch.float64) - expected)
        return _share(difference, max(_max_abs(expected), _FLOOR * largest))


def relative_error(value: float | None, expected: float) -> float:
    """The relative error of a number; `inf` if it is missing."""
    return inf if value is None else _share(abs(value - expected), abs(expected))


def _share(difference: float, scale: float) -> float:
    """`difference` as a share of `scale`; `inf` if either is not finite."""
    if not difference < inf or not scale < inf:
        return inf
    return difference / scale if scale else (inf if difference else 0.0)
