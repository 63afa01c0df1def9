"""A custom op returns its input unchanged, between an activation and its save.

The op's schema promises a fresh ``Tensor``, and every kernel of it, the fake one included, hands
back the very tensor it was given.  Ops like this are inserted to mark a place (a wait, a probe).
A pass that trusts the schema sees two allocations; the storages say that there is one, and that
the saved value is its only holder.

Saved by default: one storage of rows * width * 4 bytes = 2048 * 1024 * 4 = 8,388,608 bytes (8
MiB), as the value that the custom op returned.
"""

import torch
from torch import nn


def _unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


def _gradient_unchanged(_context: object, gradient: torch.Tensor) -> torch.Tensor:
    return gradient


# A file may be loaded twice in one process, an op registered only once.
if not hasattr(torch.ops.offplan_samples, "pass_through"):
    torch.library.define("offplan_samples::pass_through", "(Tensor x) -> Tensor")
    torch.library.impl("offplan_samples::pass_through", ("CPU", "CUDA"), _unchanged)
    torch.library.register_fake("offplan_samples::pass_through", _unchanged)
    torch.library.register_autograd("offplan_samples::pass_through", _gradient_unchanged)


class PassThrough(nn.Module):
    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.ops.offplan_samples.pass_through(x.relu()))


def build(rows: int = 2048, width: int = 1024, features: int = 16):
    return PassThrough(width, features), (torch.randn(rows, width),)
