"""torch's small helpers, as they are: which rank has which stage, and what a traced pipe tells about itself."""

from torch.distributed.pipelining._utils import *  # noqa: F403
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping, generate_stage_to_rank_mapping

__all__ = ["generate_rank_to_stage_mapping", "generate_stage_to_rank_mapping"]
