"""torch's helpers, unchanged: mappings between ranks and stages, and information on traced pipes."""

from torch.distributed.pipelining import _utils as _torchs
from torch.distributed.pipelining._utils import *  # noqa: F403
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping, generate_stage_to_rank_mapping

from penstock.pipelining._torch_names import names_of

__all__ = ["generate_rank_to_stage_mapping", "generate_stage_to_rank_mapping"]

__getattr__ = names_of(_torchs)
