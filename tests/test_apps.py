"""Voila serves any lesson as an app: no code on the page, a live panel, a slider that a reader can move."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

LESSON = Path(__file__).resolve().parents[1] / "notebooks" / "00_start_here.ipynb"


@contextlib.contextmanager
def _voila(notebook: Path, folder: Path) -> Iterator[str]:
    """The address of a server on loopback that is gone afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shutil.copy(notebook, folder / notebook.name)
    command = [sys.executable, "-m", "voila", str(folder / notebook.name), "--no-browser", f"--port={port}"]
    command += ["--Voila.ip=127.0.0.1"]
    env = {**os.environ, "COMERA_LAB_FIGURES": "", "JUPYTER_CONFIG_DIR": str(folder), "JUPYTER_PLATFORM_DIRS": "1"}
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    try:
        address = f"http://127.0.0.1:{port}/"
        _until_it_answers(address + "voila/static/voila.js", server, folder / "log")
        yield address
    finally:
        server.terminate()
        server.wait(20)


def _until_it_answers(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except urllib.error.HTTPError as error:
            error.close()
            return  # it answers
        except OSError:
            time.sleep(0.3)
    raise AssertionError(log.read_text())


@pytest.mark.slow
@pytest.mark.browser
def test_voila_serves_a_lesson_with_a_live_panel_and_no_code(tmp_path: Path) -> None:
    with _voila(LESSON, tmp_path) as address, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page()
        tab.goto(address, timeout=120_000)
        slider = tab.locator(".t-panel-start .t-rank .noUi-handle")
        slider.wait_for(timeout=120_000)
        tab.locator(".t-panel-start .js-plotly-plot .main-svg, .t-panel-start .comera-figure .main-svg").first.wait_for(
            timeout=60_000
        )
        before = tab.locator(".t-panel-start .t-rank-entry input").input_value()
        slider.focus()
        tab.keyboard.press("ArrowRight")
        entry = "document.querySelector('.t-panel-start .t-rank-entry input').value"
        tab.wait_for_function(f"before => {entry} !== before", arg=before, timeout=30_000)
        assert "check_version" not in tab.locator("body").inner_text()
        browser.close()
