"""Models that people train, each about a gigabyte or more of activations, for the benchmarks.

A target file with many factories: ``offplan run benchmarks/models.py:llama -p layers=4``.  Weights
are random and nothing is downloaded.  ``MODELS`` lists what ``benchmarks/peak.py`` measures.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

# Name: factory and its parameters.
MODELS: dict[str, tuple[str, dict[str, str]]] = {
    "llama, labels, tied, GQA": ("llama", {}),
    "llama, no labels": ("llama", {"labels": "false"}),
    "llama, checkpointed": ("llama", {"checkpoint": "true", "layers": "6"}),
    "qwen3, labels": ("qwen3", {}),
    "qwen3, no labels": ("qwen3", {"labels": "false"}),
    "gpt2, labels, dropout, tied": ("gpt2", {}),
    "gpt2, no labels": ("gpt2", {"labels": "false"}),
    "bert, dropout": ("bert", {}),
    "vit": ("vit", {}),
    "resnet": ("resnet", {}),
    "unet": ("unet", {}),
    "mixture of experts": ("experts", {}),
    "recurrent": ("recurrent", {}),
}


def _decoder(config: Any, batch: int, seq: int, labels: bool, checkpoint: bool = False) -> Any:
    config.use_cache = False
    family = transformers.AutoModelForCausalLM if labels else transformers.AutoModel
    model = family.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.train()
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.randint(config.vocab_size, (batch, seq))
    return model, (), {"input_ids": tokens, **({"labels": tokens} if labels else {})}


def llama(
    layers: int = 3,
    batch: int = 4,
    seq: int = 2048,
    labels: bool = True,
    checkpoint: bool = False,
    vocabulary: int = 32000,
):
    """With 16 layers and a vocabulary of 128256 as wide as Llama-3.2-1B."""
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    return _decoder(config, batch, seq, labels, checkpoint)


def qwen3(
    layers: int = 3,
    batch: int = 4,
    seq: int = 2048,
    labels: bool = True,
    vocabulary: int = 50000,
    tied: bool = False,
):
    """Tied, with 28 layers and a vocabulary of 151936, as wide as Qwen3-1.7B."""
    config = transformers.Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
    )
    return _decoder(config, batch, seq, labels)


def gpt2(layers: int = 4, batch: int = 8, seq: int = 1024, labels: bool = True):
    config = transformers.GPT2Config(n_embd=1600, n_head=25, n_layer=layers)
    return _decoder(config, batch, seq, labels)


def bert(layers: int = 4, batch: int = 16, seq: int = 512):
    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=4096
    )
    model = transformers.BertForMaskedLM(config).train()
    tokens = torch.randint(config.vocab_size, (batch, seq))
    mask = torch.ones(batch, seq, dtype=torch.int64)
    return model, (), {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def vit(layers: int = 6, batch: int = 96):
    config = transformers.ViTConfig(
        hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=4096
    )
    model = transformers.ViTForImageClassification(config).to(torch.bfloat16).train()
    return (
        model,
        (torch.randn(batch, 3, 224, 224, dtype=torch.bfloat16),),
        {"labels": torch.randint(2, (batch,))},
    )


def resnet(batch: int = 64):
    config = transformers.ResNetConfig(num_labels=1000)
    model = transformers.ResNetForImageClassification(config).train()
    return model, (torch.randn(batch, 3, 224, 224),), {"labels": torch.randint(1000, (batch,))}


class EncoderBlock(nn.Module):
    """Pre-norm attention and an MLP with GELU; dropout after the softmax and both branches."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))), self.dropout)


class Encoder(nn.Module):
    """Many tokens and few parameters: what is saved is a hundred times what is trained."""

    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderBlock(width, 16, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wanted = x
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.head(self.norm(x)), wanted)


def encoder(
    layers: int = 12,
    batch: int = 96,
    seq: int = 512,
    width: int = 1024,
    dropout: float = 0.1,
    dtype: str = "bfloat16",
):
    of = {"dtype": getattr(torch, dtype)}
    model = Encoder(width, layers, dropout).to(**of).train()
    return model, (torch.randn(batch, seq, width, **of),)


class UNet(nn.Module):
    """Each level's output skips to the same level on the way up: long-lived activations."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(levels + 1)]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        pairs = list(itertools.pairwise(sizes))
        self.down = nn.ModuleList(self._block(a, b) for a, b in pairs)
        self.up = nn.ModuleList(self._block(b + a, a) for a, b in reversed(pairs))
        self.head = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _block(inner: int, outer: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1),
            nn.GroupNorm(8, outer),
            nn.SiLU(),
            nn.Conv2d(outer, outer, 3, padding=1),
            nn.GroupNorm(8, outer),
            nn.SiLU(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        skips = []
        for block in self.down:
            skips.append(x)
            x = block(F.avg_pool2d(x, 2))
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], dim=1))
        return self.head(x).square().mean()


def unet(
    width: int = 64,
    levels: int = 4,
    batch: int = 8,
    size: int = 256,
    dtype: str = "float32",
    channels_last: bool = False,
):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    of = {"dtype": getattr(torch, dtype), "memory_format": layout}
    return UNet(width, levels).to(**of), (torch.randn(batch, 3, size, size).to(**of),)


class Experts(nn.Module):
    """Top-k routing in fixed shapes: each expert takes its best tokens, up to a capacity."""

    def __init__(self, width: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(experts))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.norm(x).flatten(0, -2)
        weights, chosen = self.router(flat).softmax(-1).topk(self.top_k, dim=-1)
        gates = flat.new_zeros(len(flat), len(self.up)).scatter(1, chosen, weights)
        capacity = len(flat) * self.top_k * 5 // (4 * len(self.up))
        mixed = torch.zeros_like(flat)
        for column, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            gate, rows = gates[:, column].topk(capacity)
            mixed = mixed.index_add(0, rows, down(F.gelu(up(flat[rows]))) * gate[:, None])
        return x + mixed.view_as(x)


def experts(layers: int = 2, batch: int = 8, seq: int = 1024, width: int = 1024):
    blocks = []
    for _ in range(layers):
        blocks.append(
            nn.TransformerEncoderLayer(
                width, 16, 2 * width, dropout=0.0, batch_first=True, norm_first=True
            )
        )
        blocks.append(Experts(width, 8, 2))
    return nn.Sequential(*blocks).train(), (torch.randn(batch, seq, width),)


class Cell(nn.Module):
    """A gated recurrent unit, written out: torch's own has no fake kernel on CUDA."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * width, 2 * width)
        self.candidate = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        update, reset = self.gates(torch.cat([x, state], -1)).sigmoid().chunk(2, -1)
        new = self.candidate(torch.cat([x, reset * state], -1)).tanh()
        return update * state + (1 - update) * new


class Recurrent(nn.Module):
    """Two layers of gated recurrent cells, unrolled."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.cells = nn.ModuleList(Cell(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        state = [x.new_zeros(x.shape[0], x.shape[2]) for _ in self.cells]
        outputs = []
        for step in range(x.shape[1] - 1):
            inner = x[:, step]
            for place, cell in enumerate(self.cells):
                inner = state[place] = cell(inner, state[place])
            outputs.append(inner)
        logits = self.head(torch.stack(outputs, dim=1))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def recurrent(batch: int = 2048, seq: int = 12, width: int = 1536, vocabulary: int = 8000):
    return Recurrent(width, vocabulary), (torch.randint(vocabulary, (batch, seq)),)
