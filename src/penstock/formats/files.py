"""Whole files: UTF-8 text, keys from JSON or TOML, and atomic writes.

A write goes to a temporary file in the same directory, which then replaces the target. A reader sees the old
content or the new content, never a part of it.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from penstock.errors import FormatError

if sys.version_info >= (3, 11):
    import tomllib
else:  # the backport of the same module
    import tomli as tomllib

__all__ = ["read_keys", "read_text", "require_extension", "write_bytes", "write_text"]


def require_extension(path: Path, *allowed: str) -> str:
    """Return the file's extension in lower case, such as `.json`; raise `FormatError` if it is not allowed."""
    extension = path.suffix.lower()
    if extension not in allowed:
        problem = f"unknown file extension {extension or '(none)'}; use {' or '.join(allowed)}"
        raise FormatError(str(path), [problem])
    return extension


def read_text(path: Path) -> str:
    """Read a UTF-8 file, without its byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(str(path), [f"byte {error.start} is not valid UTF-8"]) from None


def read_keys(path: str | os.PathLike[str]) -> object:
    """Parse a `.json` or `.toml` file."""
    path = Path(path)
    extension = require_extension(path, ".json", ".toml")
    text = read_text(path)
    try:
        document: object = json.loads(text) if extension == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(str(path), [f"invalid {extension[1:].upper()}: {error}"]) from None
    return document


def write_text(text: str, path: Path) -> None:
    """Write a UTF-8 file atomically, as `write_bytes` does."""
    write_bytes(text.encode("utf-8"), path)


def write_bytes(content: bytes, path: Path) -> None:
    """Write a file atomically; a symbolic link is followed, and the mode of an existing file is kept."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():  # a pipe or a device cannot be replaced
        target.write_bytes(content)
        return
    temporary = target.with_name(f".{token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            temporary.chmod(target.stat().st_mode)
        temporary.replace(target)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # report the caller's path, not the temporary one
        raise
