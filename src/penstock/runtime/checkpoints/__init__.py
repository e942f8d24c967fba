"""Checkpoints with the tensor names of the whole model, independent of ranks and stages."""
