"""What every benchmark result says about where it was measured."""

from __future__ import annotations

import json
import os
import platform
import re
import threading
import time
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


class Results:
    """The result file of one benchmark, written as often as there is something to write."""

    def __init__(self, topic: str, what: str, device: str, out: Path) -> None:
        self.machine = describe_machine()
        if device == "cuda" and "gpu" not in self.machine:
            raise SystemExit("there is no GPU here; --device cpu --small tries the script out")
        name = self.machine["gpu"] if device == "cuda" else "cpu"
        name = re.sub(r"^nvidia-", "", name.lower().replace(" ", "-"))
        self.command = f"python benchmarks/{topic}.py {what or 'run'}"
        self.path = out / ("-".join(filter(None, (name, topic, what))) + ".json")
        self.start = time.perf_counter()
        self.lock = threading.Lock()
        out.mkdir(parents=True, exist_ok=True)

    def keep(self, found: dict[str, Any]) -> None:
        """Write ``found``: a run that is cut off later has not been for nothing."""
        wall_s = round(time.perf_counter() - self.start, 1)
        result = {"command": self.command, "machine": self.machine, "wall_s": wall_s, **found}
        with self.lock:
            self.path.write_text(json.dumps(result, indent=2) + "\n")

    def close(self, found: dict[str, Any]) -> None:
        """Write ``found``, and say what it comes to: exit code 3 if a target was missed."""
        self.keep(found)
        print(f"wrote {self.path.name}")
        for what, met in found.get("met", {}).items():
            print(f"{'met' if met else 'MISSED':7} {what}")
        if not found["ok"]:
            raise SystemExit(3)


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
