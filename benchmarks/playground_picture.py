"""Takes the picture of docs/play.md with chromium: `python -m benchmarks.playground_picture docs/play.png`."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.support.browser import start_chromium

from benchmarks.playground import server

ADDRESS = "#ranks=4&microbatches=8&schedules=1f1b,zb-h1,zbv&latency_seconds=0.1&limit=4"
SIZE = {"width": 1440, "height": 1130, "deviceScaleFactor": 1, "mobile": False}


def main(path: str) -> None:
    with server() as port, tempfile.TemporaryDirectory() as profile:
        driver = start_chromium(Path(profile))
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", SIZE)
        driver.get(f"http://127.0.0.1:{port}/{ADDRESS}")
        deadline = time.monotonic() + 60
        while not driver.execute_script("return window.penstock && document.body.dataset.busy === '0'"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(1)  # fonts, and the line of progress
        driver.save_screenshot(path)
        driver.quit()


if __name__ == "__main__":
    main(sys.argv[1])
