"""torch's functions to split a batch into microbatches and merge outputs, and checks of a batch that is split.

The functions are unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.distributed.pipelining import microbatch as _theirs
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
    sum_reducer,
)

from penstock.arguments import listed, plural
from penstock.errors import PipelineError
from penstock.pipelining._torch_names import names_of

__all__ = ["TensorChunkSpec", "merge_chunks", "split_args_kwargs_into_chunks", "sum_reducer"]

_split_tensor = _theirs._split_tensor
__getattr__ = names_of(_theirs)

_RESERVED = ("return_outputs", "self", "target")
"""The parameters of `Pipeline.step`, which no keyword of a module can be called."""


def refuse_whole_batch(args: Sequence[object], kwargs: Mapping[str, object], target: object) -> None:
    """Raise if a call that has microbatches also has a whole batch."""
    given = ["positional arguments: pass arg_mbs="] if args else []
    given += [f"{listed(sorted(kwargs))}: pass kwarg_mbs="] if kwargs else []
    given += ["target: pass target_mbs="] if target is not None else []
    if given:
        raise ValueError(f"a call with arg_mbs, kwarg_mbs or target_mbs takes no {'; no '.join(given)}")


def check_types(arg_mbs: Sequence[object], kwarg_mbs: Sequence[object]) -> None:
    """Raise if the arguments of a microbatch are not a tuple, or its keyword arguments not a dict."""
    for name, entries, wanted in (("arg_mbs", arg_mbs, tuple), ("kwarg_mbs", kwarg_mbs, dict)):
        for k, entry in enumerate(entries):
            if not isinstance(entry, wanted):
                raise TypeError(f"{name}[{k}] must be a {wanted.__name__} (given a {type(entry).__name__})")


def check_same_arguments(
    arg_mbs: Sequence[Sequence[object]], kwarg_mbs: Sequence[Mapping[str, object]]
) -> None:
    """Raise if microbatches differ in their arguments, or a keyword is a parameter of our step."""
    names = [listed(sorted(kwargs)) or "none" for kwargs in kwarg_mbs]
    for k, args in enumerate(arg_mbs):
        if len(args) != len(arg_mbs[0]):
            counts = f"arg_mbs[0] has {plural(len(arg_mbs[0]), 'argument')}, arg_mbs[{k}] has {len(args)}"
            raise PipelineError(f"every microbatch must have as many arguments, but {counts}")
        if names[k] != names[0]:
            differing = f"kwarg_mbs[0] has {names[0]}, kwarg_mbs[{k}] has {names[k]}"
            raise PipelineError(f"every microbatch must have the same keywords, but {differing}")
    if reserved := [name for name in _RESERVED if name in kwarg_mbs[0]]:
        raise PipelineError(f"kwarg_mbs has {listed(reserved)}, which no keyword of a module can be called")
