"""torch's stages, unchanged: our schedules use their module, stage index and process group."""

from torch.distributed.pipelining import stage as _torchs
from torch.distributed.pipelining.stage import PipelineStage, _PipelineStage, _PipelineStageBase, build_stage

from penstock.pipelining._torch_names import names_of

__all__ = ["PipelineStage", "_PipelineStage", "_PipelineStageBase", "build_stage"]
__all__ += [name for name in _torchs.__all__ if name not in __all__]

__getattr__ = names_of(_torchs)
