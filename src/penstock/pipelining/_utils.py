"""torch's helpers, unchanged: mappings between ranks and stages, and information on traced pipes."""

from torch.distributed.pipelining._utils import *  # noqa: F403
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping, generate_stage_to_rank_mapping

__all__ = ["generate_rank_to_stage_mapping", "generate_stage_to_rank_mapping"]
