"""Whole files: UTF-8 text, keys from JSON or TOML, and atomic writes.

A write goes to a temporary file in the same directory, which then replaces the target. A reader sees the old
content or the new content, never a part of it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

from penstock.errors import FormatError, Message, Parameter

if sys.version_info >= (3, 11):
    import tomllib
else:  # the backport of the same module
    import tomli as tomllib


def require_extension(path: Path, *allowed: str) -> str:
    """Return the file's extension in lower case, such as `.json`; raise `FormatError` if it is not allowed."""
    extension = path.suffix.lower()
    if extension not in allowed:
        raise FormatError(str(path), [_extension_problem(path, " or ".join(allowed))])
    return extension


def _extension_problem(path: Path, allowed: str) -> str:
    if not path.is_dir():
        return f"unknown file extension {path.suffix.lower() or '(none)'}; use {allowed}"
    config = path / "config.json"
    meant = f"; did you mean {config}?" if ".json" in allowed and config.is_file() else ""
    return f"it is a directory; give a {allowed} file{meant}"


def read_text(path: Path) -> str:
    """Read a UTF-8 file, without its byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(str(path), [f"not a text file: byte {error.start} is not valid UTF-8"]) from None


def read_keys(path: str | os.PathLike[str]) -> object:
    """Parse a `.json` or `.toml` file."""
    path = Path(path)
    extension = require_extension(path, ".json", ".toml")
    text = read_text(path)
    try:
        document: object = parse_json(text) if extension == ".json" else tomllib.loads(text)
    except JsonError as error:
        raise FormatError(str(path), [str(error)]) from None
    except (ValueError, RecursionError) as error:
        raise FormatError(str(path), [f"invalid TOML: {error}"]) from None
    return document


class JsonError(ValueError):
    """Text that is not JSON; the message says why and where."""


def parse_json(text: str, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:  # noqa: ANN401 -- any JSON
    """Parse JSON text; raise `JsonError` if that is not possible."""
    if not text.strip():
        raise JsonError("invalid JSON: the file is empty")
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except json.JSONDecodeError as error:
        raise JsonError(f"line {error.lineno}, column {error.colno}: invalid JSON: {error.msg}") from None
    except (ValueError, RecursionError):
        raise JsonError("invalid JSON: a number is too long or the nesting too deep") from None


def write_text(text: str, path: Path) -> None:
    """Write a UTF-8 file atomically, as `write_bytes` does."""
    write_bytes(text.encode("utf-8"), path)


def open_stream(path: Path) -> int | None:
    """The descriptor behind a name such as /dev/stdout, which may be redirected to a file; else None."""
    if path.parent in (Path("/dev/fd"), Path("/proc/self/fd")) and path.name.isdecimal():
        return int(path.name)
    return {Path("/dev/stdout"): 1, Path("/dev/stderr"): 2}.get(path)


def write_bytes(content: bytes, path: Path) -> None:
    """Write a file atomically; a symbolic link is followed, and the mode of an existing file is kept."""
    target = Path(os.path.realpath(path))
    if (number := open_stream(path)) is not None:
        sys.stdout.flush()
        with open(os.dup(number), "wb") as stream:  # noqa: PTH123 -- a descriptor
            stream.write(content)
        return
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


# What a file of another kind is, and which command reads it: for messages about the wrong file.


SCHEDULE = Message("a schedule, which penstock show, check, simulate and compare read")
COSTS = Message("costs of stages, which ", Parameter("costs"), " takes")
_CONFIG = Message(
    *("a model's config.json, which penstock estimate (", Parameter("output"), " writes costs) and "),
    "penstock plan read",
)
_MODEL = Message(
    *("a model file with costs of layers, which penstock plan reads (", Parameter("write")),
    " writes a schedule and costs)",
)
_TRACE = Message("a trace, which penstock read-trace reads")
_KINDS = {
    "stage_to_rank": SCHEDULE,
    "model_type": _CONFIG,
    "layers": _MODEL,
    "traceEvents": _TRACE,
    "forward_seconds": COSTS,
    "backward_seconds": COSTS,
}
"""By a key that only files of this kind have."""


def kind_of_file(document: object) -> Message | None:
    """The kind of a file with these keys, and what reads it; None if it is not known."""
    keys = document if isinstance(document, Mapping) else {}
    return next((kind for key, kind in _KINDS.items() if key in keys), None)
