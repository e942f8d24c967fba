"""torch's descriptions of values for logs, unchanged."""

from torch.distributed.pipelining import _debug as _torchs

from penstock.pipelining._torch_names import names_of

__getattr__ = names_of(_torchs)
