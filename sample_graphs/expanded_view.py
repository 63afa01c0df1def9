"""The saved view is an expanded one (stride 0): several heads read one activation.

The weight gradient of the batched product reads the activation once per head, so what is saved
carries ``heads`` times the bytes of its storage.  Copying the values out would multiply them for
real; copying the storage moves each byte once and the stride of 0 comes back with it.

Saved by default: one storage of rows * width * 4 bytes = 2048 * 1024 * 4 = 8,388,608 bytes (8
MiB), as one view that carries heads * rows * width * 4 = 2 * 8,388,608 = 16,777,216 bytes.  With
three or more heads min-cut saves the relu output instead, since it weighs values and not
storages.
"""

import torch
from torch import nn


class SharedInputHeads(nn.Module):
    def __init__(self, heads: int, width: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(heads, width, features) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = x.relu().expand(self.weight.shape[0], -1, -1)
        return torch.bmm(shared, self.weight)


def build(heads: int = 2, rows: int = 2048, width: int = 1024, features: int = 16):
    return SharedInputHeads(heads, width, features), (torch.randn(rows, width),)
