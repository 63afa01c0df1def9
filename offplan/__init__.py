"""offplan: a memory-planning analyzer for PyTorch training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offplan.replay.eager import offload_activations
    from offplan.target import Target

__version__ = "0.1.0"
__all__ = ["Target", "__version__", "offload_activations"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: ``offplan --help`` and ``offplan gate`` run without torch.
    if name == "Target":
        from offplan.target import Target

        return Target
    if name == "offload_activations":
        from offplan.replay.eager import offload_activations

        return offload_activations
    raise AttributeError(f"module 'offplan' has no attribute {name!r}")
