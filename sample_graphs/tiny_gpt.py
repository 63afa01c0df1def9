"""A small GPT: attention, dropout, and the loss computed inside the model.

Dropout saves its masks, which are booleans, and attention saves the seed and the offset of its
random numbers instead of a mask.  No fused kernel saves the seq x seq matrix, which is how the
traced attention kernel shows.

Saved by default, with A = batch * seq * width * 4 = 16 * 256 * 384 * 4 = 6,291,456 bytes: in each
block 16 A, for the first norm's output (A), query, key and value in one storage (3 A), the
attention output (A), the sum after it (A), the second norm's output (A), the hidden layer before
and after GELU (4 A each) and the sum after that (A); around the blocks 2 A, for the embeddings
and the last norm's output; and the log-probabilities, batch * seq * vocabulary * 4 = 16 * 256 *
512 * 4 = 8,388,608 bytes.  Together (2 * 16 + 2) * 6,291,456 + 8,388,608 = 222,298,112 bytes.
The masks, batch * seq * width = 1,572,864 bytes each, are under the 5 MiB minimum.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        query, key, value = (
            part.view(batch, seq, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=-1)
        )
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, width))


class Block(nn.Module):
    def __init__(self, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(heads, width, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class TinyGPT(nn.Module):
    def __init__(
        self, layers: int, heads: int, width: int, vocabulary: int, seq: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(seq, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(heads, width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(
    layers: int = 2,
    batch: int = 16,
    seq: int = 256,
    width: int = 384,
    heads: int = 6,
    vocabulary: int = 512,
    dropout: float = 0.1,
):
    model = TinyGPT(layers, heads, width, vocabulary, seq, dropout)
    tokens = torch.randint(vocabulary, (batch, seq))
    return model, (tokens,), {"labels": tokens}
