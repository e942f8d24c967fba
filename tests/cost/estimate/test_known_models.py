"""Promise: a well-known model is found by its name, however it is spelled; a file is never taken for one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cost.estimate import known_models, read_config
from penstock.cost.estimate.model_config import is_model_name
from penstock.errors import FormatError
from tests.support.model_configs import CONFIGS


@pytest.mark.parametrize("name", known_models())
def test_a_name_gives_the_model_of_its_committed_config(name: str) -> None:
    assert read_config(name) == read_config(CONFIGS / f"{name}.json")


@pytest.mark.parametrize("name", ["llama3-8b", "Llama-3-8B", "llama_3_8b", "LLAMA38B"])
def test_hyphens_underscores_and_capitals_do_not_matter(name: str) -> None:
    assert read_config(name) == read_config("llama-3-8b")


def test_an_unknown_name_is_told_all_names_and_the_nearest() -> None:
    with pytest.raises(FormatError) as failure:
        read_config("qwen3-23b")
    assert all(name in str(failure.value) for name in known_models())
    assert str(failure.value).endswith("did you mean qwen3-32b?")


def test_a_file_is_not_taken_for_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("gpt2.json", "models/gpt2", "./gpt2", "gpt2.toml"):
        assert not is_model_name(path)
    assert is_model_name("gpt2")
    Path("gpt2").mkdir()
    assert not is_model_name("gpt2")


def test_the_configs_are_objects_with_a_model_type() -> None:
    for name in known_models():
        assert "model_type" in json.loads((CONFIGS / f"{name}.json").read_text())
