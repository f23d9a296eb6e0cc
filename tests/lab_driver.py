"""JupyterLab and a headless browser, driven as a learner drives them. Everything lives in a temporary folder.

`with LabDriver(browser, notebook, folder) as lab:` starts a server on loopback with a token of its own, opens the
notebook by URL and gives the few verbs the tests need. A slider is found by the class its control carries, a chart
by the class of its figure. `limit_mib` and `cores` stand for a small machine: each process may hold that much memory.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import psutil
from playwright.sync_api import Browser, sync_playwright

BROWSER_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--enable-unsafe-swiftshader",
]  # fmt: skip

SETTINGS = {
    # Every cell stays in the page, so that outputs below the window can be found.
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none", "scrollPastEnd": False},
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
}

PAGE_SCRIPT = """
window.lab = {
  panel() {
    for (const w of window.jupyterapp.shell.widgets('main')) if (w.sessionContext && w.content.widgets) return w;
  },
  traces(selector) {
    const box = document.querySelector(selector);
    const list = a => a === undefined ? [] : a.bdata === undefined ? Array.from(a)
      : Array.from(new {f8: Float64Array, f4: Float32Array, i4: Int32Array, i2: Int16Array, i1: Int8Array,
                        u1: Uint8Array, u2: Uint16Array, u4: Uint32Array}[a.dtype](
          Uint8Array.from(atob(a.bdata), c => c.charCodeAt(0)).buffer));
    if (!box || !box._fullLayout) return null;
    return box.data.map(t => ({name: t.name || '', x: list(t.x), y: list(t.y)}));
  },
  painted(selector) {
    return Array.from(document.querySelectorAll(selector + ' .main-svg')).map(svg => svg.innerHTML).join('');
  },
  async kernel(code) {
    const kernel = window.lab.panel().sessionContext.session.kernel;
    const future = kernel.requestExecute({code: code, store_history: false});
    let text = '', error = null;
    future.onIOPub = m => {
      if (m.header.msg_type === 'stream' && m.content.name === 'stdout') text += m.content.text;
      if (m.header.msg_type === 'error') error = m.content.ename + ': ' + m.content.evalue;
    };
    await future.done;
    return {text, error};
  },
  errors: [],
  watch() {
    const kernel = window.lab.panel().sessionContext.session.kernel;
    if (kernel.watched) return;
    kernel.watched = true;
    kernel.anyMessage.connect((_, a) => {
      const m = a.msg;
      if (m.header.msg_type === 'error') window.lab.errors.push(m.content.ename + ': ' + m.content.evalue);
      if (m.header.msg_type === 'stream' && m.content.name === 'stderr') window.lab.errors.push(m.content.text);
    });
    kernel.statusChanged.connect((_, s) => {
      if (/dead|autorestarting/.test(s)) window.lab.errors.push('kernel ' + s);
    });
  },
};
"""


@contextmanager
def headless_browser() -> Iterator[Browser]:
    """Debian's chromium, one for all tests: playwright allows one event loop in a process."""
    chromium = shutil.which("chromium")
    assert chromium, "chromium is needed for the browser tests: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=BROWSER_FLAGS)
        yield browser
        browser.close()


class LabDriver:
    def __init__(
        self,
        browser: Browser,
        notebook: Path,
        folder: Path,
        *,
        size: tuple[int, int] = (1280, 900),
        limit_mib: int | None = None,
        cores: set[int] | None = None,
    ) -> None:
        self.browser, self.notebook, self.folder = browser, notebook, folder
        self.size, self.limit_mib, self.cores = size, limit_mib, cores
        self.console: list[str] = []
        self.peak_mib: dict[str, float] = {}
        self._watching = threading.Event()

    def __enter__(self) -> Self:
        try:
            self._start_server()
            self._open_page()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._watching.set()
        if hasattr(self, "page"):
            self.page.close()
        if hasattr(self, "server"):
            family = psutil.Process(self.server.pid).children(recursive=True)
            self.server.terminate()
            self.server.wait(20)
            for process in psutil.wait_procs(family, 5)[1]:
                process.kill()
            self._log.close()

    def _start_server(self) -> None:
        root = self.folder / "root"
        root.mkdir(parents=True)
        # a solution edition looks for its pictures in the folder above
        self.place = Path("solutions" if self.notebook.parent.name == "solutions" else "") / self.notebook.name
        (root / self.place).parent.mkdir(exist_ok=True)
        shutil.copy(self.notebook, root / self.place)
        pictures = self.notebook.parents[len(self.place.parts) - 1] / "images"
        if pictures.is_dir():
            shutil.copytree(pictures, root / "images")
        for name, values in SETTINGS.items():
            path = self.folder / "settings" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))
        self.token = secrets.token_hex(16)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        environment = {
            **os.environ,
            **{f"JUPYTER_{kind.upper()}_DIR": str(self.folder / kind) for kind in ("config", "data", "runtime")},
            "JUPYTERLAB_SETTINGS_DIR": str(self.folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(self.folder / "workspaces"),
            "IPYTHONDIR": str(self.folder / "ipython"),
            "JUPYTER_PLATFORM_DIRS": "1",
            "JUPYTER_TOKEN": self.token,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        command = [
            sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={self.port}",
            "--ServerApp.port_retries=0", f"--ServerApp.root_dir={root}", "--allow-root", "--expose-app-in-browser",
        ]  # fmt: skip
        self._log = (self.folder / "server.log").open("w")
        self.server = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            preexec_fn=self._small_machine,
        )
        self.until("the server to answer", self._answers, 60)
        threading.Thread(target=self._watch_memory, daemon=True).start()

    def _small_machine(self) -> None:
        if self.limit_mib is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (self.limit_mib << 20, self.limit_mib << 20))
        if self.cores is not None:
            os.sched_setaffinity(0, self.cores)

    def _answers(self) -> bool:
        assert self.server.poll() is None, (self.folder / "server.log").read_text()[-2000:]
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/api/status?token={self.token}")
        try:
            with urllib.request.urlopen(request, timeout=5):
                return True
        except (urllib.error.URLError, TimeoutError):
            return False

    def _watch_memory(self) -> None:
        """Peak memory of the server and of the kernels, MiB: resident, and of a kernel's own processes what is theirs
        alone, since they share their pages with what they were forked from."""
        while not self._watching.wait(0.1):
            try:
                server = psutil.Process(self.server.pid)
                sizes = {"server": server.memory_info().rss, "kernel": 0}
                for child in server.children():
                    sizes["kernel"] += child.memory_info().rss
                    sizes["kernel"] += sum(one.memory_full_info().uss for one in child.children(recursive=True))
            except psutil.NoSuchProcess:
                continue
            sizes["server + kernel"] = sum(sizes.values())
            for name, size in sizes.items():
                self.peak_mib[name] = max(self.peak_mib.get(name, 0), size / 2**20)

    def _open_page(self) -> None:
        self.page = self.browser.new_page(viewport={"width": self.size[0], "height": self.size[1]})
        self.page.add_init_script(PAGE_SCRIPT)
        self.page.on("console", lambda m: self.console.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.goto(f"http://127.0.0.1:{self.port}/lab/tree/{self.place.as_posix()}?token={self.token}")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        self.until("a kernel", lambda: self.page.evaluate("!!window.lab.panel()?.sessionContext?.session?.kernel"), 60)
        self.page.evaluate("window.lab.watch()")
        self.page.keyboard.press("Control+b")  # the file browser takes a quarter of the window

    def until(self, what: str, test: Callable[[], Any], seconds: float = 15) -> Any:
        """The first truthy value of `test`, waiting at most `seconds`."""
        end = time.monotonic() + seconds
        while True:
            found = test()
            if found:
                return found
            assert time.monotonic() < end, f"waited {seconds} s for {what}"
            if hasattr(self, "page"):
                self.page.wait_for_timeout(20)
            else:
                time.sleep(0.1)

    def run_all(self, seconds: float = 120) -> float:
        """Run > Run All Cells; returns the seconds until every cell has its number."""
        begin = time.monotonic()
        self.page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
        prompts = "Array.from(document.querySelectorAll('.jp-CodeCell .jp-InputPrompt'))"
        busy = prompts + r".some(p => /\[[ *]?\]/.test(p.innerText))"
        self.until("all cells to run", lambda: not self.page.evaluate(busy), seconds)
        return time.monotonic() - begin

    def traces(self, figure: str) -> list[dict[str, Any]]:
        return self.until(f"{figure} to be drawn", lambda: self.page.evaluate("s => window.lab.traces(s)", figure), 30)

    def painted(self, figure: str) -> str:
        return str(self.page.evaluate("s => window.lab.painted(s)", figure))

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()

    def value(self, slider: str) -> float:
        return float(self.page.locator(f"{slider} .noUi-handle").first.get_attribute("aria-valuenow") or "nan")

    def drag(self, slider: str, fraction: float) -> float:
        """Drag the handle with the mouse to that fraction of the track; the new value."""
        handle = self.page.locator(f"{slider} .noUi-handle").first
        handle.scroll_into_view_if_needed()
        track = self.page.locator(f"{slider} .noUi-base").first.bounding_box()
        grip = handle.bounding_box()
        assert track and grip
        y = grip["y"] + grip["height"] / 2
        start, end = grip["x"] + grip["width"] / 2, track["x"] + track["width"] * fraction
        self.page.mouse.move(start, y)
        self.page.mouse.down()
        for part in range(1, 11):
            self.page.mouse.move(start + (end - start) * part / 10, y)
            self.page.wait_for_timeout(15)
        self.page.mouse.up()
        self.page.wait_for_timeout(100)
        return self.value(slider)

    def press(self, slider: str, key: str, times: int = 1) -> float:
        self.page.locator(f"{slider} .noUi-handle").first.focus()
        for _ in range(times):
            self.page.keyboard.press(key)
        self.page.wait_for_timeout(100)
        return self.value(slider)

    def type(self, entry: str, text: str) -> None:
        box = self.page.locator(f"{entry} input").first
        box.fill(text)
        box.press("Enter")

    def click(self, selector: str) -> None:
        self.page.locator(selector).first.click()

    def answer_ms(self, button: str, words: str, text: str) -> float:
        """Click `button` and wait until the element `words` holds `text`, timed inside the page."""
        script = """async ([button, words, text]) => {
            const start = performance.now();
            document.querySelector(button).click();
            while (!document.querySelector(words).innerText.includes(text)) {
                if (performance.now() - start > 10000) throw new Error('no answer in 10 s');
                await new Promise(done => setTimeout(done, 5));
            }
            return performance.now() - start;
        }"""
        return float(self.page.evaluate(script, [button, words, text]))

    def kernel(self, code: str) -> str:
        """What `code` prints in the notebook's kernel."""
        answer = self.page.evaluate("code => window.lab.kernel(code)", code)
        assert answer["error"] is None, answer["error"]
        return str(answer["text"])

    def theme(self, name: str) -> None:
        command = "n => window.jupyterapp.commands.execute('apputils:change-theme', {theme: n})"
        self.page.evaluate(command, f"JupyterLab {name.capitalize()}")
        dark = "false" if name == "dark" else "true"
        self.page.wait_for_selector(f"body[data-jp-theme-light='{dark}']", state="attached")
        self.page.wait_for_timeout(700)

    def shot(self, path: Path, selector: str | None = None) -> None:
        target = self.page.locator(selector).first if selector else self.page
        target.screenshot(path=str(path))

    def faults(self) -> list[str]:
        """Everything that went wrong and a learner may not see: kernel errors, tracebacks, browser errors."""
        return [*self.page.evaluate("window.lab.errors"), *self.console]
