"""Activation checkpointing, seen by the analysis: only each block's input is saved.

``torch.utils.checkpoint`` recomputes a block in the backward, so its norm and its wide hidden
layer are not saved.  ``-p checkpointing=false`` shows what that buys.

Saved by default: layers * rows * width * 4 = 3 * 8192 * 256 * 4 = 25,165,824 bytes (24 MiB).
Without checkpointing, each layer adds the normalised input (rows * width * 4), the hidden layer
(four times that) and the norm's statistics (2 * rows * 4): 3 * (6 * 8,388,608 + 65,536) =
151,191,552 bytes.  The last layer's output is the caller's, and x is too.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class CheckpointedMLP(nn.Module):
    def __init__(self, layers: int, width: int, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x


def build(layers: int = 3, rows: int = 8192, width: int = 256, checkpointing: bool = True):
    return CheckpointedMLP(layers, width, checkpointing), (torch.randn(rows, width),)
