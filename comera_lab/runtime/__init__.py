"""What is this machine? Versions, device, limits, allocator, triton; threads and seeds.

Imports nothing else of the kit, so every other module may ask it.
"""

from comera_lab.runtime.machine import (
    AllocatorStatus,
    allocator_status,
    cores_allowed,
    cpu_quota,
    limit_threads,
    memory_limit_bytes,
    physical_memory_bytes,
    pick_device,
    seed_everything,
    tune_cpu_allocator,
)
from comera_lab.runtime.packages import Verdict, check_version, check_versions, installed_versions, require
from comera_lab.runtime.report import Doctor, TritonStatus, doctor, triton_status

__all__ = [
    "AllocatorStatus",
    "Doctor",
    "TritonStatus",
    "Verdict",
    "allocator_status",
    "check_version",
    "check_versions",
    "cores_allowed",
    "cpu_quota",
    "doctor",
    "installed_versions",
    "limit_threads",
    "memory_limit_bytes",
    "physical_memory_bytes",
    "pick_device",
    "require",
    "seed_everything",
    "triton_status",
    "tune_cpu_allocator",
]
