"""torch's functions for the backward of a stage, unchanged; our steps do not call them."""

from torch.distributed.pipelining import _backward as _torchs

from penstock.pipelining._torch_names import names_of

__getattr__ = names_of(_torchs)
