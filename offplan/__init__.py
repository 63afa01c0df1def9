"""offplan: a memory-planning analyzer for PyTorch training."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offplan.api import analyze
    from offplan.plan import Plan
    from offplan.replay.eager import offload_activations
    from offplan.replay.training import Backend, StepStats, backend
    from offplan.target import Target

__version__ = "0.1.0"
__all__ = [
    "Backend",
    "Plan",
    "StepStats",
    "Target",
    "__version__",
    "analyze",
    "backend",
    "offload_activations",
]

# Loaded on first use: ``offplan --help`` and ``offplan gate`` run without torch.
_MODULES = {
    "Backend": "replay.training",
    "Plan": "plan",
    "StepStats": "replay.training",
    "Target": "target",
    "analyze": "api",
    "backend": "replay.training",
    "offload_activations": "replay.eager",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"offplan.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'offplan' has no attribute {name!r}")
