"""File formats: schedules as torch CSV and as JSON, and whole files."""

from penstock.formats.files import write_bytes, write_text
from penstock.formats.schedules import dumps, format_of, read, reads, write

__all__ = ["dumps", "format_of", "read", "reads", "write", "write_bytes", "write_text"]
