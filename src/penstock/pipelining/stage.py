"""torch's stages, unchanged: our schedules use their module, stage index and process group."""

from torch.distributed.pipelining.stage import PipelineStage, _PipelineStage, _PipelineStageBase, build_stage

__all__ = ["PipelineStage", "_PipelineStage", "_PipelineStageBase", "build_stage"]
