"""torch's stages, as they are: a schedule of ours takes the module, the place and the group out of them."""

from torch.distributed.pipelining.stage import PipelineStage, _PipelineStage, _PipelineStageBase, build_stage

__all__ = ["PipelineStage", "_PipelineStage", "_PipelineStageBase", "build_stage"]
