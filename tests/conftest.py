"""Settings for every test: few threads, bounded hypothesis runs, reproducible draws."""

from __future__ import annotations

import os
from importlib.util import find_spec

# Before torch is imported anywhere: threads that wait for a core that something else uses stall every small step.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What tests answer is nobody's work; a test that saves names a file of its own.
os.environ["COMERA_LAB_PROGRESS"] = "off"

import pytest
import torch
from hypothesis import HealthCheck, settings

# Kernel files import triton, which has no build for macOS and Windows; tests of the door to them run everywhere.
collect_ignore_glob = [] if find_spec("triton") else ["test_kernel_*.py"]

settings.register_profile(
    "lab", max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("lab")


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
