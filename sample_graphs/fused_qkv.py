"""Query, key and value are three views of one projection's output.

Attention's backward reads all three, so three saved views share one storage: each of them holds
it for the other two, and none can leave on its own.  The attention output has the same trouble:
its backward reads it as one view (a ``detach``), and the output projection as another (a
``view``).

Saved by default: the projection's output, batch * seq * 3 * width * 4 = 8 * 512 * 3 * 512 * 4 =
25,165,824 bytes (24 MiB), as three views of a third each; the attention output, batch * seq *
width * 4 = 8 * 512 * 512 * 4 = 8,388,608 bytes (8 MiB), as two views of all of it; and
attention's log-sum-exp, batch * heads * seq * 4 = 8 * 8 * 512 * 4 = 131,072 bytes.  A view of x
is saved as well, and x is the caller's.
"""

import torch
from torch import nn
from torch.nn import functional as F


class FusedQKV(nn.Module):
    def __init__(self, heads: int, head_size: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_size = head_size
        width = heads * head_size
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, self.head_size)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, width))


def build(batch: int = 8, seq: int = 512, heads: int = 8, head_size: int = 64):
    return FusedQKV(heads, head_size), (torch.randn(batch, seq, heads * head_size),)
