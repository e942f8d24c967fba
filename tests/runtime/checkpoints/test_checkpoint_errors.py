"""Promise: a checkpoint that does not fit is rejected with every problem, and files are not trusted."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import zlib
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.optim import SGD, AdamW

from penstock import CheckpointError
from penstock.runtime import load_checkpoint, save_checkpoint
from penstock.runtime.checkpoints import checkpoint
from tests.support.checkpoints import error_of, same, small
from tests.support.damage import forge_index

# --- what does not fit -----------------------------------------------------------------------------


def test_all_problems_are_reported_at_once_and_nothing_is_changed(tmp_path: Path) -> None:
    model = small()
    save_checkpoint(tmp_path / "c", model, AdamW(model.parameters()))
    other = small(4).bfloat16()
    other.extra = nn.Linear(1, 1)
    del other.norm
    before = {name: value.clone() for name, value in other.state_dict().items()}
    assert error_of(tmp_path / "c", other, SGD(other.parameters())) == [
        "'first.weight' is float32 [3, 2] in the checkpoint, but bfloat16 [4, 2] in the model",
        "'first.bias' is float32 [3] in the checkpoint, but bfloat16 [4] in the model",
        "'last.weight' is float32 [2, 3] in the checkpoint, but bfloat16 [2, 4] in the model",
        "'last.bias' is float32 [2] in the checkpoint, but bfloat16 [2] in the model",
        "the model has names that are missing in the checkpoint: extra.weight, extra.bias",
        (
            "the optimizer in the checkpoint is AdamW, but this one is SGD: create the same, or load without "
            "optimizer="
        ),
        (
            "the checkpoint has names that no rank's model has: norm.weight, norm.bias, norm.running_mean, "
            "norm.running_var, norm.num_batches_tracked"
        ),
    ]
    assert all(same(value, before[name]) for name, value in other.state_dict().items())


def test_an_optimizer_with_other_parameters_is_rejected(tmp_path: Path) -> None:
    model = small()
    save_checkpoint(tmp_path / "c", model)
    assert error_of(tmp_path / "c", model, SGD(model.parameters())) == [
        "the checkpoint has no optimizer state: load it without optimizer="
    ]
    save_checkpoint(tmp_path / "c", model, SGD(model.first.parameters()))
    assert error_of(tmp_path / "c", model, SGD(model.last.parameters())) == [
        (
            "the checkpoint has no optimizer options for these parameters of the optimizer: last.weight, "
            "last.bias; create the optimizer with the same parameters, or load without optimizer="
        ),
        (
            "the checkpoint has optimizer options for parameters that no rank's optimizer has: first.weight, "
            "first.bias"
        ),
    ]
    with pytest.raises(
        CheckpointError, match=r"parameters that no module of the model has: parameter 1 of group 0"
    ):
        save_checkpoint(tmp_path / "c", model.first, SGD([model.first.weight, model.last.weight]))


def test_a_path_without_a_checkpoint_is_reported(tmp_path: Path) -> None:
    assert error_of(tmp_path / "none", small()) == [f"{tmp_path / 'none'} does not exist"]
    (tmp_path / ".none.unfinished").mkdir()
    assert "a save began, but did not finish" in error_of(tmp_path / "none", small())[0]
    (tmp_path / "empty").mkdir()
    assert "is not a checkpoint: it has no .metadata" in error_of(tmp_path / "empty", small())[0]
    (tmp_path / "file").touch()
    assert "is a file, but a checkpoint is a directory" in error_of(tmp_path / "file", small())[0]


def test_a_directory_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    precious = tmp_path / "mine" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("years", encoding="utf-8")
    save_checkpoint(tmp_path / "c", small())
    (tmp_path / "c" / "notes.txt").touch()
    for path in (precious, precious.parent, tmp_path / "c"):
        with pytest.raises(
            CheckpointError, match="other files than those of a checkpoint, and is not replaced"
        ):
            save_checkpoint(path, small())
    assert (tmp_path / "c" / "notes.txt").exists()
    assert precious.read_text(encoding="utf-8") == "years"


def test_a_symbolic_link_stays(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(tmp_path / "runs" / "one")
    for value in (1, 2):
        save_checkpoint(tmp_path / "latest", small(), extra=value)
    assert (tmp_path / "latest").is_symlink()
    assert load_checkpoint(tmp_path / "runs" / "one", small()) == 2


def test_a_newer_format_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "FORMAT", 3)
        save_checkpoint(tmp_path / "c", small())
    assert error_of(tmp_path / "c", small()) == [
        "it has format 3, but this version of Penstock reads format 2: install a newer version"
    ]


def test_other_objects_meta_tensors_and_extra_state_are_rejected(tmp_path: Path) -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> object:
            return {"a": 1}

    stages: Any = {0: nn.Linear(2, 2)}
    with pytest.raises(CheckpointError, match=r"the model must be a Pipeline or an nn.Module, not a dict"):
        save_checkpoint(tmp_path / "c", stages)
    with torch.device("meta"):
        nowhere = nn.Linear(2, 2, bias=False)
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path / "c", nn.ModuleDict({"a": nowhere, "b": Odd(2, 2)}))
    problems = " ".join(caught.value.problems)
    assert "'a.weight' of stage 0 is on the meta device" in problems
    assert "the module 'b' has extra state" in problems


# --- files that lie --------------------------------------------------------------------------------


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


def test_an_index_that_would_run_code_runs_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", small())
    index = tmp_path / "c" / ".metadata"
    index.write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    (problem,) = error_of(tmp_path / "c", small())
    assert problem.startswith("its index .metadata is damaged, or another program wrote")
    assert not (tmp_path / "ran").exists()


def test_an_entry_that_would_be_unpickled_is_rejected(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", small())
    index = tmp_path / "c" / ".metadata"
    known = pickle.loads(index.read_bytes())  # noqa: S301 -- written just now
    known.state_dict_metadata["model.first.weight"] = BytesStorageMetadata()
    index.write_bytes(pickle.dumps(known))
    assert "its index .metadata is damaged, or another program wrote" in str(error_of(tmp_path / "c", small()))


def test_tensor_data_that_would_run_code_runs_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", small())
    (data,) = (tmp_path / "c").glob("*.distcp")
    evil = io.BytesIO()
    torch.save(Evil(tmp_path / "ran"), evil)

    def replace(index: Any) -> None:
        """The data of the last part, with valid checksums."""
        *_, last = sorted(
            (chunk for _, _, chunks in index["entries"].values() for chunk in chunks), key=itemgetter(3)
        )
        written = data.read_bytes()[: last[3]] + evil.getvalue()
        data.write_bytes(written)
        last[4] = len(evil.getvalue())
        index["files"][data.name][::2] = len(written), [zlib.crc32(written)]

    forge_index(tmp_path / "c", replace)
    before = small()
    model = copy.deepcopy(before)
    assert "Weights only load failed" in str(error_of(tmp_path / "c", model))
    assert all(map(same, before.parameters(), model.parameters()))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_a_damaged_index_is_rejected(tmp_path: Path, kept: int) -> None:
    save_checkpoint(tmp_path / "c", small())
    index = tmp_path / "c" / ".metadata"
    index.write_bytes(index.read_bytes()[:kept])
    (problem,) = error_of(tmp_path / "c", small())
    assert problem.startswith("its index .metadata is damaged")


def test_truncated_missing_or_outside_data_is_rejected(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", small())
    (data,) = (tmp_path / "c").glob("*.distcp")
    whole = data.read_bytes()
    data.write_bytes(whole[:5000])
    assert f"its file {data.name} is truncated: it has 5000 bytes instead of {len(whole)}" in str(
        error_of(tmp_path / "c", small())
    )
    data.unlink()
    assert f"its file {data.name} is missing" in str(error_of(tmp_path / "c", small()))
    save_checkpoint(tmp_path / "c", small())

    def move_up(index: Any) -> Any:
        return json.loads(json.dumps(index).replace(data.name, f"../{data.name}"))

    forge_index(tmp_path / "c", move_up)
    assert error_of(tmp_path / "c", small()) == [
        f"its index .metadata is damaged: these are not names of data files in the directory: ../{data.name}"
    ]


def test_data_other_than_tensors_is_json(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", small(), extra=["found"])
    (data,) = (tmp_path / "c").glob("*.distcp")
    text = data.read_bytes()
    start = text.index(b'{"format"')
    assert json.JSONDecoder().raw_decode(text[start:].decode("utf-8", "replace"))[0]["extra"] == ["found"]
