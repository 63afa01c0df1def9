"""A training loop that keeps its peak memory within a budget: a small model, on Python's manual.

    python examples/train_loop.py --budget floor
    python examples/train_loop.py --layers 24 --width 2048 --batch 16 --length 2048 --budget 60%

offplan takes two lines of it: the backend, and its name in ``torch.compile``.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
from torch import nn

import offplan

parser = argparse.ArgumentParser()
parser.add_argument("--budget", help="60GiB, 70%%, auto, floor, or 0; none by default")
parser.add_argument("--compiler", default="inductor", choices=("inductor", "aot_eager"))
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--length", type=int, default=256)
parser.add_argument("--steps", type=int, default=4)
options = parser.parse_args()


class Model(nn.Module):
    """Predicts each byte of a text from those before it."""

    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.bytes(text[:, :-1]) + self.places, self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())


torch.manual_seed(0)
text = torch.frombuffer(bytearray("".join(topics.values()).encode()), dtype=torch.uint8).long()
model = Model(options.layers, options.width, options.length).to(options.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

with offplan.backend(
    budget=options.budget,
    compiler=options.compiler,
    device=options.device,
    optimizer="adamw",
    min_size="256KiB",
) as backend:
    compiled = torch.compile(model, backend=backend, dynamic=False)
    for step in range(options.steps):
        starts = torch.randint(len(text) - options.length - 1, (options.batch,))
        rows = [text[start : start + options.length + 1] for start in starts]
        with backend.measure() as measured:
            loss = compiled(torch.stack(rows).to(options.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        (found,) = measured
        print(
            f"step {step}: loss {loss.item():.3f}, {found.step_ms:.0f} ms, "
            f"{found.offloaded_bytes / 1e6:.1f} MB moved to the host and back"
            + (
                f", peak {found.peak_allocated_bytes / 1e9:.3f} GB"
                if model.head.weight.is_cuda
                else ""
            )
        )
    for plan in backend.plans:
        no_plan, peak = plan.predicted.no_plan.peak_bytes, plan.predicted.plan.peak_bytes
        print(f"predicted peak {peak / 1e6:.1f} MB, without a plan {no_plan / 1e6:.1f} MB")
