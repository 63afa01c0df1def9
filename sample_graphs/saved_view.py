"""A view is the only saved value of its storage: x -> relu -> view -> linear.

The linear layer's weight gradient reads the flattened activation, so the view is saved.  Nothing
in the backward reads the relu output itself (x needs no gradient), so the view alone holds it.

Saved by default: one storage of batch * channels * side * side * 4 bytes = 64 * 128 * 16 * 16 * 4
= 8,388,608 bytes (8 MiB), as one view of all of it.
"""

import torch
from torch import nn


class SavedView(nn.Module):
    def __init__(self, pixels: int, features: int) -> None:
        super().__init__()
        self.head = nn.Linear(pixels, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.relu().view(x.shape[0], -1))


def build(batch: int = 64, channels: int = 128, side: int = 16, features: int = 16):
    model = SavedView(channels * side * side, features)
    return model, (torch.randn(batch, channels, side, side),)
