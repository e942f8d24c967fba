"""File formats: schedules as CSV and JSON, and files written whole or not at all."""

from penstock.formats.schedule_files import dumps, format_of, read, reads, write, write_bytes, write_text

__all__ = ["dumps", "format_of", "read", "reads", "write", "write_bytes", "write_text"]
