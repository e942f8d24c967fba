"""Promise: `penstock play` of an installed wheel serves the whole page, without node and without a network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = {"index.html", "main.js", "lessons.js", "play.css"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel contains."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(ROOT)]
    subprocess.run(build, check=True)  # noqa: S603 -- our own interpreter
    (wheel,) = folder.glob("penstock-*.whl")
    target = folder / "site"
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True)  # noqa: S603 -- our own interpreter
    return target


@pytest.fixture(scope="module")
def address(installed: Path) -> Iterator[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed), "PATH": "", "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(
        [sys.executable, "-m", "penstock", "play", "--no-open"],
        cwd=installed.parent,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    found = re.search(r"http://127\.0\.0\.1:\d+/", server.stdout.readline())
    assert found
    yield found[0]
    server.terminate()
    server.wait(30)
    server.stdout.close()


def fetch(address: str, path: str) -> str:
    with urlopen(f"{address}{path}", timeout=300) as response:  # noqa: S310 -- our own server
        text: str = response.read().decode()
    return text


def linked(path: str, text: str) -> set[str]:
    """The files that a page or a script loads."""
    if path.endswith(".js"):
        return {f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', text)}
    if path == "":
        return set(re.findall(r'(?:href|src)="([^"#]+)"', text))
    return set()


@pytest.mark.full
def test_every_file_of_the_page_is_in_the_wheel(installed: Path, address: str) -> None:
    files = {path.name for path in (installed / "penstock" / "web" / "page").iterdir()}
    assert files >= NEEDED
    loaded: dict[str, str] = {}
    waiting = {""}
    while waiting:
        path = waiting.pop()
        loaded[path] = fetch(address, path)
        waiting |= linked(path, loaded[path]) - loaded.keys()
    generated = {"page/timelines.js", "page/timelines.css"}
    assert loaded.keys() == {"", *generated} | {f"page/{name}" for name in files - {"index.html"}}
    everything = "\n".join(text for path, text in loaded.items() if not path.endswith(".svg"))
    assert set(re.findall(r"https?://[^\s\"'`)]+", everything)) <= {"http://www.w3.org/2000/svg"}


@pytest.mark.full
def test_the_server_of_the_wheel_answers(address: str) -> None:
    body = json.dumps({"schedules": [{"family": "1f1b", "ranks": 4, "microbatches": 8}]}).encode()
    request = Request(f"{address}api/compare", body, {"Content-Type": "application/json"})  # noqa: S310
    with urlopen(request, timeout=300) as response:  # noqa: S310 -- our own server
        assert json.load(response)["schedules"][0]["row"]["makespan"] == 33
    request = Request(f"{address}api/lessons", b"{}", {"Content-Type": "application/json"})  # noqa: S310
    with urlopen(request, timeout=300) as response:  # noqa: S310 -- our own server
        assert len(json.load(response)["lessons"]) == 10
