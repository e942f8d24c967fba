"""The API of `torch.distributed.pipelining` on our runtime: a script only changes its import.

Actions, stages, chunk specs and traced pipes are torch's own objects, so both packages can be mixed. Orders,
validation, pictures and steps are ours. docs/migrate.md lists the differences.
"""

import sys

import penstock.runtime  # noqa: F401 -- first: its error names a missing torch
from penstock.pipelining._torch_names import mirror  # its error says which names this torch has lost

# isort: split
from torch.distributed import pipelining as _torchs
from torch.distributed.pipelining import Pipe, PipelineStage, SplitPoint, build_stage, pipe_split, pipeline

from penstock.pipelining import microbatch, schedules
from penstock.pipelining.microbatch import *  # noqa: F403
from penstock.pipelining.schedules import *  # noqa: F403

__all__ = ["Pipe", "PipelineStage", "SplitPoint", "build_stage", "pipe_split", "pipeline"]
__all__ += microbatch.__all__
__all__ += schedules.__all__

_others = {name: getattr(_torchs, name) for name in _torchs.__all__ if name not in __all__}
"""What a newer torch has as well, such as `PipelineStageInfo` of 2.15."""
globals().update(_others)
__all__ += list(_others)

mirror(sys.modules[__name__], "_IR", "_backward", "_debug", "_unflatten", "_utils")
