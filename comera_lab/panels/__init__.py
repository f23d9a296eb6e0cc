"""Panels for notebooks: `import comera_lab.panels as lab; lab.StartPanel()`.

Importing this caps torch at one thread on machines with two cores or fewer: a core stays free for the page, and
threads that wait for a busy core do not stall a step. It also lets the C library keep freed memory for the next
tensor, where there is enough (`runtime.tune_cpu_allocator`; COMERA_LAB_ALLOCATOR=off leaves it alone). Nothing is
trained, downloaded or printed.
"""

from comera_lab.runtime import cores_allowed, limit_threads, require, tune_cpu_allocator

require("ipywidgets", "panels")
require("plotly", "figures")

from comera_lab.panels.budget import BudgetPanel  # noqa: E402
from comera_lab.panels.budget_cell import budget_point, budget_table  # noqa: E402
from comera_lab.panels.budget_report import budget_report  # noqa: E402
from comera_lab.panels.code_model import CodeModelPanel  # noqa: E402
from comera_lab.panels.crossing import CrossingPanel  # noqa: E402
from comera_lab.panels.diffusion import DiffusionPanel  # noqa: E402
from comera_lab.panels.embedding import EmbeddingPanel  # noqa: E402
from comera_lab.panels.kernel_step import KernelStepPanel  # noqa: E402
from comera_lab.panels.memory import MemoryPanel  # noqa: E402
from comera_lab.panels.optimizer_race import OptimizerRacePanel  # noqa: E402
from comera_lab.panels.page import show_figures_on_pages  # noqa: E402
from comera_lab.panels.pareto import ParetoPanel  # noqa: E402
from comera_lab.panels.pictures import image_row, part_bars  # noqa: E402
from comera_lab.panels.planner import PlannerPanel  # noqa: E402
from comera_lab.panels.predict import Predict, Question  # noqa: E402
from comera_lab.panels.processes import ProcessesPanel  # noqa: E402
from comera_lab.panels.projection import ProjectionPanel  # noqa: E402
from comera_lab.panels.race import RacePanel  # noqa: E402
from comera_lab.panels.ranks import RankTrainingPanel  # noqa: E402
from comera_lab.panels.recommender import RecommenderPanel  # noqa: E402
from comera_lab.panels.roofline import RooflinePanel  # noqa: E402
from comera_lab.panels.shape import ShapePanel  # noqa: E402
from comera_lab.panels.spectrum import SpectrumPanel  # noqa: E402
from comera_lab.panels.start import StartPanel  # noqa: E402
from comera_lab.panels.state import LabState, lab_state  # noqa: E402
from comera_lab.panels.trace import TracePanel  # noqa: E402

__all__ = [
    "BudgetPanel",
    "CodeModelPanel",
    "CrossingPanel",
    "DiffusionPanel",
    "EmbeddingPanel",
    "KernelStepPanel",
    "LabState",
    "MemoryPanel",
    "OptimizerRacePanel",
    "ParetoPanel",
    "PlannerPanel",
    "Predict",
    "ProcessesPanel",
    "ProjectionPanel",
    "Question",
    "RacePanel",
    "RankTrainingPanel",
    "RecommenderPanel",
    "RooflinePanel",
    "ShapePanel",
    "SpectrumPanel",
    "StartPanel",
    "TracePanel",
    "budget_point",
    "budget_report",
    "budget_table",
    "image_row",
    "lab_state",
    "part_bars",
]

# Not for speed: 784-512-512-10 made 301 steps a second with one thread and 362 to 399 with two on quiet cores.
limit_threads(1 if cores_allowed() <= 2 else None)
tune_cpu_allocator()
show_figures_on_pages()
