"""Bridges to other trainers: schedules and layouts as their flags and files."""

from penstock.integrations.export import Export
from penstock.integrations.megatron import export_megatron
from penstock.integrations.torchtitan_export import export_torchtitan

__all__ = ["Export", "export_megatron", "export_torchtitan"]
