"""Damage to the files of a checkpoint, and what a load does with it."""

from __future__ import annotations

import json
import random
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from penstock import CheckpointError
from penstock.runtime import load_checkpoint, save_checkpoint

__all__ = ["DAMAGE", "forge_index", "made", "outcome", "restore", "save_two_steps"]


def made(value: float) -> tuple[nn.Linear, SGD]:
    """A model and an optimizer with numbers that depend on `value`."""
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).view(2, 3) * value)
        model.bias.copy_(torch.tensor([-1.0, -2.0]) * value)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = parameter.detach() * 10
    return model, optimizer


def save_two_steps(directory: Path) -> list[Path]:
    """Two checkpoints of one model, with different numbers."""
    paths = [directory / "one", directory / "two"]
    for value, path in enumerate(paths, 1):
        save_checkpoint(path, *made(value), extra={"step": 6 + value})
    return paths


def restore(source: Path, target: Path) -> None:
    """Make `target` a copy of `source` again."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


def forge_index(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the JSON of an index and make its checksum right again, as no accident does."""
    file = path / ".metadata"
    content = file.read_bytes()
    length, _, magic = struct.unpack("<QI8s", content[-20:])
    known = json.loads(content[-20 - length : -20])
    changed = change(known)
    text = json.dumps(known if changed is None else changed).encode()
    body = content[: -20 - length] + text + struct.pack("<Q", len(text))
    file.write_bytes(body + struct.pack("<I8s", zlib.crc32(body), magic))


def outcome(path: Path, **options: Any) -> str:
    """The problems of a load that was refused, or "same" if the right values were loaded."""
    model, optimizer = made(5)
    try:
        extra = load_checkpoint(path, model, optimizer, **options)
    except CheckpointError as error:
        changed = _differences(made(5), (model, optimizer))
        return f"changed: {changed}" if changed else "\n".join(error.problems)
    wrong = _differences(made(1), (model, optimizer))
    if optimizer.param_groups[0]["lr"] != 0.5 or extra != {"step": 7}:
        wrong.append("options")
    return f"loaded, wrong: {wrong}" if wrong else "same"


def _differences(expected: tuple[nn.Module, SGD], found: tuple[nn.Module, SGD]) -> list[str]:
    """The names of parameters whose values or state differ."""
    return [
        name
        for (name, one), other in zip(expected[0].named_parameters(), found[0].parameters())
        if not torch.equal(one, other)
        or not torch.equal(expected[1].state[one]["momentum_buffer"], found[1].state[other]["momentum_buffer"])
    ]


def flip_bit(data: bytearray, at: int, chance: random.Random) -> None:
    data[at] ^= 1 << chance.randrange(8)


def overwrite(data: bytearray, at: int, chance: random.Random) -> None:
    end = min(len(data), at + chance.choice([1, 4, 8, 64, 512]))
    data[at:end] = b"\0" * (end - at)


def truncate(data: bytearray, at: int, _: random.Random) -> None:
    del data[at:]


def extend(data: bytearray, _: int, chance: random.Random) -> None:
    data += chance.randbytes(chance.choice([1, 8, 4096]))


def delete_bytes(data: bytearray, at: int, chance: random.Random) -> None:
    del data[at : at + chance.choice([1, 2, 16])]


def insert_bytes(data: bytearray, at: int, chance: random.Random) -> None:
    data[at:at] = chance.randbytes(chance.choice([1, 2, 16]))


def repeat_bytes(data: bytearray, at: int, chance: random.Random) -> None:
    data[at:at] = data[at : at + chance.choice([64, 512])]


def swap_bytes(data: bytearray, at: int, chance: random.Random) -> None:
    other = chance.randrange(len(data))
    data[at], data[other] = data[other], data[at]


DAMAGE: list[Callable[[bytearray, int, random.Random], None]] = [
    flip_bit,
    overwrite,
    truncate,
    extend,
    delete_bytes,
    insert_bytes,
    repeat_bytes,
    swap_bytes,
]
"""Changes of the content of a file at a position."""
