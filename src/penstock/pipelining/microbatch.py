"""torch's functions to split a batch into microbatches and merge outputs, unchanged."""

from torch.distributed.pipelining import microbatch as _theirs
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
    sum_reducer,
)

from penstock.pipelining._torch_names import names_of

__all__ = ["TensorChunkSpec", "merge_chunks", "split_args_kwargs_into_chunks", "sum_reducer"]

_CustomReducer, _LossReducer, _Replicate = _theirs._CustomReducer, _theirs._LossReducer, _theirs._Replicate  # noqa: SLF001
_split_tensor = _theirs._split_tensor  # noqa: SLF001

__getattr__ = names_of(_theirs)
