"""torch's names over our runtime: change `torch.distributed.pipelining` to this in a script, and it runs here.

The words (actions, stages, chunk specs, traced pipes) are torch's own objects, so both sides understand each
other; orders, proofs, pictures and steps are ours. docs/migrate.md says where the two differ.
"""

import penstock.runtime  # noqa: F401 -- first: it names a missing torch

# isort: split
from torch.distributed.pipelining import Pipe, PipelineStage, SplitPoint, build_stage, pipe_split, pipeline

from penstock.pipelining import microbatch, schedules
from penstock.pipelining.microbatch import *  # noqa: F403
from penstock.pipelining.schedules import *  # noqa: F403

__all__ = ["Pipe", "PipelineStage", "SplitPoint", "build_stage", "pipe_split", "pipeline"]
__all__ += microbatch.__all__
__all__ += schedules.__all__
