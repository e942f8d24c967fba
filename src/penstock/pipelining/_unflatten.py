"""torch's helpers to restore submodules of traced pipes, unchanged."""

from torch.distributed.pipelining import _unflatten as _torchs

from penstock.pipelining._torch_names import names_of

__getattr__ = names_of(_torchs)
