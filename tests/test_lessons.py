"""The lessons as learners meet them: both editions run from top to bottom once, and much is asked of the runs.

Student editions run where they lie, with live widgets, every cell twice. Solution editions run in another folder,
against the built wheel instead of the checkout, and as nbconvert would run them.
"""

import asyncio
import copy
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from nbconvert import HTMLExporter
from playwright.sync_api import sync_playwright

from comera_lab.teaching.build import check_drift
from comera_lab.teaching.exercises import EXERCISES

# the first test waits for all ten runs: about a minute on two quiet cores, several on busy ones
pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
LESSONS = (
    "00_start_here",
    "01_where_training_memory_goes",
    "02_low_rank",
    "03_tensor_trains_by_hand",
    "04_a_tt_layer_that_trains",
    "05_letting_training_choose_the_ranks",
    "06_hitting_a_compression_target",
    "07_embedding_tables",
    "08_a_compressed_transformer",
    "09_projecting_gradients",
    "10_coap",
    "11_coap_for_convolutions",
    "12_kernels_without_a_gpu",
    "13_real_gpu_runs",
    "14_pretraining_a_code_model",
    "15_beyond_one_machine",
    "T0_for_teachers",
    "16_capstone",
)
FILES = [folder / f"{name}.ipynb" for name in LESSONS for folder in (NOTEBOOKS, NOTEBOOKS / "solutions")]
CELL_SECONDS, LESSON_SECONDS = 30, 180

WATCH = """
import threading
thread_errors = []
_old_hook = threading.excepthook
threading.excepthook = lambda what: (thread_errors.append(repr(what.exc_value)), _old_hook(what))
"""
# To a file: a print would be one more output of the lesson.
REPORT = r"""
import json, re, sys, threading, comera_lab
from pathlib import Path
from comera_lab.teaching import checks
# VmHWM, not ru_maxrss: the latter starts from the size of the process that forked the kernel
status = Path("/proc/self/status")
peak_kib = re.search(r"VmHWM:\s+(\d+)", status.read_text())[1] if status.is_file() else 0
with open({path!r}, "w") as file:
    json.dump({{
        "verdicts": {{key: [v.passed, v.stage] for key, v in checks._VERDICTS.items()}},
        "thread_errors": thread_errors,
        "left_alive": [t.name for t in threading.enumerate() if t.name.startswith("comera-lab")],
        "package": comera_lab.__file__, "python": sys.executable,
        "peak_mib": int(peak_kib) / 1024,
    }}, file)
"""


@dataclass(frozen=True)
class Run:
    """One executed edition."""

    name: str
    notebook: Any
    report: dict[str, Any]
    seconds: float
    cell_seconds: list[float]


def _execute(path: Path, folder: Path, report: Path, env: dict[str, str], times: int = 1) -> Run:
    notebook = nbformat.read(path, 4)
    notebook.cells = [copy.deepcopy(cell) for cell in notebook.cells for _ in range(times)]
    notebook.cells.insert(0, nbformat.v4.new_code_cell(WATCH))
    notebook.cells.append(nbformat.v4.new_code_cell(REPORT.format(path=str(report))))
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    began = time.monotonic()
    asyncio.run(client.async_execute(env={**os.environ, **env}))  # its own loop: the pool's threads have none
    seconds = time.monotonic() - began
    notebook.cells = notebook.cells[1:-1]
    cell_seconds = [_cell_seconds(cell) for cell in notebook.cells if cell.cell_type == "code"]
    return Run(path.stem, notebook, json.loads(report.read_text()), seconds, cell_seconds)


def _cell_seconds(cell: Any) -> float:
    stamps = cell.metadata.execution
    first, last = (
        datetime.fromisoformat(stamps[key].replace("Z", "+00:00"))
        for key in ("iopub.execute_input", "shell.execute_reply")
    )
    return (last - first).total_seconds()


@pytest.fixture(scope="module")
def wheel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as it is released, unpacked: nothing of the checkout is in it."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture(scope="module")
def runs(wheel_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Run]]:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    jobs = {}
    with ThreadPoolExecutor(2) as pool:
        for name in LESSONS:
            jobs[name, "student"] = pool.submit(
                _execute,
                NOTEBOOKS / f"{name}.ipynb",
                NOTEBOOKS,
                elsewhere / f"{name}.student.json",
                {"COMERA_LAB_FIGURES": "live"},
                times=2,
            )
            jobs[name, "solution"] = pool.submit(
                _execute,
                NOTEBOOKS / "solutions" / f"{name}.ipynb",
                elsewhere,
                elsewhere / f"{name}.solution.json",
                {"PYTHONPATH": str(wheel_folder), "COMERA_LAB_FIGURES": ""},
            )
        yield {key: job.result() for key, job in jobs.items()}


def _exercises(name: str) -> set[str]:
    return {exercise.id for exercise in EXERCISES.values() if exercise.lesson == name[:2]}


def _outputs(run: Run) -> Iterator[Any]:
    for cell in run.notebook.cells:
        yield from cell.get("outputs", ())


@pytest.mark.notebooks
@pytest.mark.parametrize("name", LESSONS)
def test_every_check_of_the_solution_edition_is_right(runs: Any, name: str) -> None:
    verdicts = runs[name, "solution"].report["verdicts"]
    assert set(verdicts) == _exercises(name)
    assert {key: stage for key, (passed, stage) in verdicts.items() if not passed} == {}


@pytest.mark.notebooks
@pytest.mark.parametrize("name", LESSONS)
def test_every_check_of_the_student_edition_says_not_yet(runs: Any, name: str) -> None:
    verdicts = runs[name, "student"].report["verdicts"]
    assert set(verdicts) == _exercises(name)
    assert {stage for _, stage in verdicts.values()} == {"stub"}


@pytest.mark.notebooks
@pytest.mark.parametrize("edition", ["student", "solution"])
@pytest.mark.parametrize("name", LESSONS)
def test_L03_runs_headless_without_waiting_or_leaving_threads(runs: Any, name: str, edition: str) -> None:
    run = runs[name, edition]
    assert run.seconds < LESSON_SECONDS
    assert run.report["thread_errors"] == []
    assert run.report["left_alive"] == []
    assert Path(run.report["python"]).resolve() == Path(sys.executable).resolve()


@pytest.mark.notebooks
@pytest.mark.parametrize("name", LESSONS)
def test_L05_cells_are_quick(runs: Any, name: str) -> None:
    for edition in ("student", "solution"):
        times = runs[name, edition].cell_seconds
        assert statistics.median(times) < 5
        assert max(times) < CELL_SECONDS


@pytest.mark.notebooks
@pytest.mark.parametrize("name", LESSONS)
def test_J04_every_cell_may_be_run_twice(runs: Any, name: str) -> None:
    run = runs[name, "student"]
    code = [cell.source for cell in run.notebook.cells if cell.cell_type == "code"]
    assert code[::2] == code[1::2]
    assert not any(output.output_type == "error" for output in _outputs(run))


@pytest.mark.notebooks
@pytest.mark.parametrize("name", LESSONS)
def test_L06_runs_from_another_folder(runs: Any, name: str) -> None:
    assert not any(output.output_type == "error" for output in _outputs(runs[name, "solution"]))


@pytest.mark.notebooks
@pytest.mark.parametrize("name", LESSONS)
def test_L07_runs_against_the_released_package(runs: Any, wheel_folder: Path, name: str) -> None:
    assert Path(runs[name, "solution"].report["package"]).is_relative_to(wheel_folder)
    assert Path(runs[name, "student"].report["package"]).is_relative_to(ROOT)


@pytest.mark.notebooks
@pytest.mark.parametrize("name", LESSONS)
def test_lessons_print_little_and_nothing_on_stderr(runs: Any, name: str) -> None:
    for edition in ("student", "solution"):
        for output in _outputs(runs[name, edition]):
            if output.output_type == "stream":
                assert output.name == "stdout", output.text
                assert output.text.count("\n") <= 20


@pytest.mark.notebooks
@pytest.mark.parametrize("name", LESSONS)
def test_L02_a_lesson_needs_less_than_a_gigabyte(runs: Any, name: str) -> None:
    peak_mib = max(runs[name, edition].report["peak_mib"] for edition in ("student", "solution"))
    print(f"{name}: peak {peak_mib:.0f} MiB, {runs[name, 'solution'].seconds:.0f} s")
    assert peak_mib < 1024


def _figures_wanted(run: Run) -> int:
    source = "\n".join(cell.source for cell in run.notebook.cells if cell.cell_type == "code")
    return len(re.findall(r"lab\.(\w+Panel\(\)|image_row\(|part_bars\()|board\.bars\(\)", source))


def _page(run: Run) -> str:
    page, _ = HTMLExporter().from_notebook_node(nbformat.from_dict(run.notebook))
    return str(page)


@pytest.mark.notebooks
@pytest.mark.parametrize("name", LESSONS)
def test_K05_the_page_has_every_figure(runs: Any, name: str) -> None:
    run = runs[name, "solution"]
    page = _page(run)  # "not able to be represented" is a warning, and warnings are errors here
    assert page.count('class="plotly-graph-div"') == _figures_wanted(run) > 0
    assert not any("application/vnd.jupyter.widget-view+json" in output.get("data", {}) for output in _outputs(run))


@pytest.mark.browser
@pytest.mark.notebooks
def test_K05_the_figures_of_a_page_are_drawn_without_the_internet(runs: Any, tmp_path: Path) -> None:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        context = browser.new_context(offline=True)
        for name in LESSONS:
            run = runs[name, "solution"]
            (tmp_path / "page.html").write_text(_page(run), encoding="utf-8")
            tab = context.new_page()
            tab.goto((tmp_path / "page.html").as_uri(), wait_until="domcontentloaded")
            drawn = tab.locator(".plotly-graph-div .main-svg:first-child")
            drawn.nth(_figures_wanted(run) - 1).wait_for(timeout=20_000)
            tab.close()
        browser.close()


@pytest.mark.notebooks
@pytest.mark.parametrize("name", LESSONS)
def test_K07_every_widget_has_a_twin_in_words(runs: Any, name: str) -> None:
    shown = 0
    for output in _outputs(runs[name, "student"]):
        data = output.get("data", {})
        if "application/vnd.jupyter.widget-view+json" in data:
            shown += 1
            assert len(data["text/html"]) > 80 and len(data["text/plain"]) > 40
    assert shown >= 2


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(NOTEBOOKS).as_posix())
def test_K07_committed_notebooks_say_how_to_run_and_hold_no_stale_widgets(path: Path) -> None:
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    assert "Run > Run All Cells" in notebook.cells[0].source
    assert notebook.cells[0].source.startswith(f"# {path.stem[:2]} ")
    assert "widgets" not in notebook.metadata
    assert all(not cell.get("outputs") for cell in notebook.cells)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(NOTEBOOKS).as_posix())
def test_L04_no_private_kernel_no_paths_no_counts(path: Path) -> None:
    notebook = nbformat.read(path, 4)
    assert notebook.metadata.kernelspec.name == "python3"
    assert all(cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
    assert not re.search(r"/(home|Users|root|tmp|work)/|[A-Z]:\\\\", path.read_text(encoding="utf-8"))


def test_no_notebook_is_stale() -> None:
    assert check_drift(ROOT) == []


@pytest.mark.parametrize("name", LESSONS)
def test_the_first_cell_checks_the_version_and_shows_the_panel(name: str) -> None:
    code = [cell.source for cell in nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4).cells if cell.cell_type == "code"]
    assert re.search(r'check_version\("[\d.]+"\)', code[0])
    assert re.search(r"^lab\.\w+Panel\(\)$", code[0], re.MULTILINE)
    assert any(f'guess("{name[:2]}")' in cell for cell in code)


@pytest.mark.parametrize("name", LESSONS)
def test_lessons_are_written_in_short_cells(name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4)
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    for cell in notebook.cells:
        assert len(cell.source.splitlines()) <= 26, cell.source
        assert max(map(len, cell.source.splitlines())) < 105, cell.source
    whole = "\n".join(texts)
    assert "Afterwards you will be able to\n\n1. " in texts[0] and "\n3. " in texts[0]
    assert re.search(r"You need (about )?(a quarter of an hour|forty minutes|an hour)", texts[0])
    assert "## What to remember" in whole and "## Where next" in whole
    assert "CC BY 4.0" in texts[-1]
    assert 1 <= len(_exercises(name)) <= 5


@pytest.mark.parametrize("name", LESSONS)
def test_no_measured_number_is_written_into_the_text(name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            claim = re.search(
                r"\d[\d.,]*\s?(ms|MiB|GiB|MB|GB|×|x faster|x smaller|times (faster|smaller))\b", cell.source
            )
            assert claim is None, claim


@pytest.mark.parametrize("name", LESSONS)
def test_links_between_lessons_lead_somewhere(name: str) -> None:
    for folder in (NOTEBOOKS, NOTEBOOKS / "solutions"):
        for cell in nbformat.read(folder / f"{name}.ipynb", 4).cells:
            for target in re.findall(r"\]\(([^)#]+)\)", cell.source) if cell.cell_type == "markdown" else ():
                assert (folder / target).is_file(), target
