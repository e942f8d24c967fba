"""Bridges to other trainers: schedules and layouts as their flags and files."""

from penstock.trainers.export import Export
from penstock.trainers.megatron import export_megatron
from penstock.trainers.torchtitan import export_torchtitan

__all__ = ["Export", "export_megatron", "export_torchtitan"]
