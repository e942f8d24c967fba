"""Gradients of pipelines compared with those of one process."""
