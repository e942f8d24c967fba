"""Promise: safetensors files that do not fit or are damaged are rejected before anything is changed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from penstock import CheckpointError
from penstock.runtime import export_safetensors, import_safetensors
from tests.support.grids import examples


def error_of(place: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        import_safetensors(place, nn.Linear(2, 2))
    return "; ".join(caught.value.problems)


def test_missing_damaged_or_outside_files_are_reported(tmp_path: Path) -> None:
    assert (
        error_of(tmp_path)
        == f"{tmp_path / 'model.safetensors'} does not exist, nor model.safetensors.index.json"
    )
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[]", encoding="utf-8")
    assert "is not a valid index" in error_of(tmp_path)
    index.write_text(json.dumps({"weight_map": {"weight": "../a", "bias": "b"}}), encoding="utf-8")
    assert error_of(tmp_path) == (
        "model.safetensors.index.json names files in other directories: ../a; "
        "model.safetensors.index.json names files that are missing: b"
    )
    index.unlink()
    (tmp_path / "model.safetensors").write_bytes(b"rubbish that is longer than a header")
    assert error_of(tmp_path).startswith("model.safetensors cannot be read: Error while deserializing header")


def test_an_index_that_would_fill_memory_is_not_read(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    with index.open("wb") as file:
        file.truncate(1 << 40)  # a sparse file
    assert error_of(tmp_path) == f"{index.name} is not a valid index: it has {1 << 40} bytes"
    index.write_text("[" * 100_000, encoding="utf-8")
    assert "is not a valid index: RecursionError" in error_of(tmp_path)


def test_integers_are_not_cast(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    model.register_buffer("count", torch.zeros(1, dtype=torch.uint8))
    save_file({"weight": torch.zeros(2, 2), "count": torch.tensor([300])}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'count' is I64 \[1\] in model.safetensors, but uint8 \[1\]"):
        import_safetensors(tmp_path, model)


def test_damage_to_a_header_or_to_the_size_is_refused_or_harmless(tmp_path: Path) -> None:
    """The format has no checksums: damage to the values cannot be noticed."""
    chance = random.Random(0)
    stored = nn.Linear(3, 2)
    export_safetensors(tmp_path / "w", stored)
    file = tmp_path / "w" / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    refused = 0
    for _ in range(examples(3000)):
        data = bytearray(whole)
        at = chance.randrange(header)
        match chance.randrange(4):
            case 0:
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                data[at : at + 1] = bytes(chance.choices(b'0123456789{}[]",:', k=chance.choice([0, 1, 2])))
            case 2:
                del data[chance.randrange(len(data)) :]
            case _:
                data += bytes(chance.choice([1, 8, 4096]))
        file.write_bytes(data)
        model = nn.Linear(3, 2)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        try:
            import_safetensors(tmp_path / "w", model)
            before = list(stored.parameters())
        except CheckpointError:
            refused += 1
        assert all(map(torch.equal, before, model.parameters()))
    assert refused > examples(3000) * 0.9
