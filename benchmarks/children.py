"""Arms that a process of its own measures, heard of one by one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# cuBLAS repeats its bits with this, and reads it when it starts.
REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

_BITS = {True: "same", False: "differ", None: "do not repeat"}


def streamed(
    script: str,
    what: str,
    spec: str,
    params: dict[str, str],
    device: str,
    environment: dict[str, str] | None = None,
) -> Iterator[dict[str, Any]]:
    """What ``script child --what ...`` has measured so far, each time that it prints more.

    It prints objects in JSON, one a line: an ``arm``, or something else of the model.
    """
    words = [sys.executable, script, "child", "--what", what, "--device", device, spec]
    words += [f"{name}={value}" for name, value in params.items()]
    lock = Path(tempfile.gettempdir()) / f"offplan-gpu{os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
    variables = {**os.environ, "GPU_LOCK": str(lock), **(environment or {})}
    start = time.perf_counter()
    found: dict[str, Any] = {"spec": spec, "params": params, "arms": []}
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.PIPE, stderr=said, text=True, env=variables
        ) as process,
    ):
        assert process.stdout is not None
        for text in process.stdout:
            if not text.startswith("{"):
                continue
            more = json.loads(text)
            if "arm" in more:
                found["arms"].append(more["arm"])
                print(f"{spec} {line(more['arm'])}", file=sys.stderr, flush=True)
            else:
                found |= more
            found["wall_s"] = round(time.perf_counter() - start, 1)
            yield dict(found)
        found["exit_code"] = process.wait()
        said.seek(0)
        found["said"] = said.read()[-3000:] if found["exit_code"] else ""
    found["wall_s"] = round(time.perf_counter() - start, 1)
    yield found


def line(arm: dict[str, Any]) -> str:
    """One arm, for people."""
    off = {name: f"{value:+.2%}" for name, value in arm.get("off", {}).items()}
    cells = (
        f"{arm['name']:12}",
        f"peak {(arm['peak_allocated_bytes'] or 0) / 1e9:6.2f} GB",
        f"{off.get('peak_allocated_bytes', ''):>8}",
        f"reserved {off.get('peak_reserved_bytes', ''):>8}",
        f"step {arm['step_ms']:7.1f} ms {off.get('step_ms', ''):>8}",
        f"moved {arm.get('moved_bytes', 0) / 1e9:6.2f} GB",
        f"bits {_BITS[arm['same_bits']]}" if "same_bits" in arm else "",
    )
    return "  ".join(cells)
