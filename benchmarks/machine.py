"""What every benchmark result says about where it was measured."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, GPU and driver as torch sees them, and package versions."""
    import torch

    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "transformers", "msgspec")},
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = properties.name
        found["gpu_memory_bytes"] = properties.total_memory
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
