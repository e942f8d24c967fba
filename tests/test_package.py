"""Promise: the wheel has every file of the package, and runs outside of the repository."""

from __future__ import annotations

import subprocess
import sys
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]

CONFIG = """{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100, "hidden_act": "silu"}"""

RUN = """
import sys
sys.path.insert(0, sys.argv[1])
sys.argv[1:2] = []
import penstock
assert penstock.__file__.startswith(sys.path[0]), penstock.__file__
from penstock.cli import command
command()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source without an isolated environment, which would need the network."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603 -- our own
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_has_exactly_the_files_of_the_package(wheel: Path) -> None:
    source = ROOT / "src"
    expected = {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == expected


@pytest.mark.full
def test_the_metadata_has_license_readme_extras_and_the_command(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        files = {name.partition(".dist-info/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
        metadata = HeaderParser().parsestr(archive.read(files["METADATA"]).decode())
        assert "penstock = penstock.cli:command" in archive.read(files["entry_points.txt"]).decode()
    assert "licenses/LICENSE" in files
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert {"torch", "search", "serve", "view"} <= set(metadata.get_all("Provides-Extra", []))
    assert not [
        each for each in metadata.get_all("Classifier", []) if "License ::" in each
    ]  # not beside the above


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["show", "1f1b", "-p", "2", "-m", "4"], "rank"),
        (["simulate", "zbv", "-p", "2", "-m", "4"], "makespan"),
        (["list"], "zbv"),
        (["play", "--help"], "--port"),
        (["show", "1f1b", "-p", "2", "-m", "4", "-o", "page.html"], "page.html"),  # the page's assets
        (["estimate", "config.json", "--device", "h100", "--seq", "128"], "h100: 989 TFLOP/s"),  # devices.toml
    ],
    ids=lambda each: " ".join(each[:2]) if isinstance(each, list) else "",
)
def test_an_installed_copy_runs_in_another_directory(
    wheel: Path, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    installed, elsewhere = wheel.parent / "installed", tmp_path / "elsewhere"
    if not installed.exists():
        with ZipFile(wheel) as archive:
            archive.extractall(installed)
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text(CONFIG)
    done = subprocess.run(  # noqa: S603 -- our own code
        [sys.executable, "-c", RUN, str(installed), *arguments],
        cwd=elsewhere,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert expected in done.stdout
