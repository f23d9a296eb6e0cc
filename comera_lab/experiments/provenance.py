"""Where a number comes from: device, driver, versions, commit, command and date of this process."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch


def device_name(device: torch.device | str = "cpu") -> str:
    """The device's own name, such as "NVIDIA H200" or "Intel(R) Xeon(R) ... (cpu)"."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"{_cpu_model()} (cpu)"
    return device.type


def driver(device: torch.device | str = "cpu") -> str | None:
    """Version of the NVIDIA driver for a cuda device, None for any other or where it cannot be asked."""
    if torch.device(device).type != "cuda":
        return None
    answer = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return answer.splitlines()[0] if answer else None


def triton_version() -> str | None:
    """Version of the installed triton, without importing it."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Commit of the checkout that this package runs from, with "-dirty" if files differ; None when installed."""
    folder = Path(__file__).resolve().parents[2]
    top = _output_of("git", "-C", str(folder), "rev-parse", "--show-toplevel")
    # an installed package may lie inside somebody else's repository, whose commit would be a lie
    if top is None or Path(top).resolve() != folder:
        return None
    return _output_of("git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def launch_command() -> str:
    """How this process was started, without the folders of this machine; "notebook" for a Jupyter kernel."""
    program = Path(sys.argv[0])
    arguments = [Path(one).name if Path(one).is_absolute() else one for one in sys.argv[1:]]
    if "ipykernel" in program.name or "ipykernel" in str(program.parent):
        return "notebook"
    if program.name == "__main__.py":
        return shlex.join(["python", "-m", program.parent.name, *arguments])
    return shlex.join(["python" if program.name in ("", "-", "-c") else program.name, *arguments])


def date() -> str:
    """Now, in UTC, as ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def recording_name(device: str, date: str) -> str:
    """File name of a recording: "gpu_nvidia-h200_2026-12-01.jsonl"."""
    words = "".join(letter if letter.isalnum() else "-" for letter in device.lower())
    return f"gpu_{'-'.join(filter(None, words.split('-')))}_{date[:10]}.jsonl"


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
