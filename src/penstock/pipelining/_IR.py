"""torch's traced pipes, unchanged."""

# ruff: noqa: N811, N999 -- torch's name

from torch.distributed.pipelining import _IR as _torchs

from penstock.pipelining._torch_names import names_of

__getattr__ = names_of(_torchs)
