"""Hugging Face's Trainer within a memory budget: a small Qwen3, on Python's manual.

    python examples/trainer.py --budget floor
    python examples/trainer.py --layers 8 --width 4096 --batch 4 --length 4096 --bf16 --budget 60%

``model.compile(backend=...)`` compiles the model in place, before the Trainer gets it.  The
Trainer's own ``torch_compile_backend`` takes only names that Accelerate lists, and no options.
"""

from __future__ import annotations

import argparse
import tempfile
from pydoc_data.topics import topics

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

import offplan

parser = argparse.ArgumentParser()
parser.add_argument("--budget", help="60GiB, 70%%, auto, floor, or 0; none by default")
parser.add_argument("--compiler", default="inductor", choices=("inductor", "aot_eager"))
parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--length", type=int, default=256)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--steps", type=int, default=3)
options = parser.parse_args()

text = torch.frombuffer(bytearray("".join(topics.values()).encode()), dtype=torch.uint8).long()
chunks = [{"input_ids": chunk, "labels": chunk} for chunk in text.split(options.length)[:-1]]

torch.manual_seed(0)
heads = options.width // 64
config = Qwen3Config(
    vocab_size=256,
    hidden_size=options.width,
    intermediate_size=3 * options.width,
    num_hidden_layers=options.layers,
    num_attention_heads=heads,
    num_key_value_heads=heads,
    head_dim=64,
    use_cache=False,
)
model = Qwen3ForCausalLM(config)

with (
    tempfile.TemporaryDirectory() as output,
    offplan.backend(
        budget=options.budget,
        compiler=options.compiler,
        device="cuda" if torch.cuda.is_available() and not options.cpu else "cpu",
        optimizer="adamw",
        accumulate=options.accumulate > 1,
        min_size="256KiB",
    ) as backend,
):
    model.compile(backend=backend, dynamic=False)
    arguments = TrainingArguments(
        output,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulate,
        bf16=options.bf16,
        use_cpu=options.cpu,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=chunks)
    with backend.measure() as measured:
        result = trainer.train()
    (found,) = measured
    print(
        f"loss {result.training_loss:.3f} over {options.steps} steps in {found.step_ms:.0f} ms, "
        f"{found.offloaded_bytes / 1e6:.1f} MB moved to the host and back"
    )
    if found.peak_allocated_bytes is not None:
        print(f"peak {found.peak_allocated_bytes / 1e9:.3f} GB")
    for plan in backend.plans:
        no_plan, peak = plan.predicted.no_plan.peak_bytes, plan.predicted.plan.peak_bytes
        print(f"predicted peak {peak / 1e6:.1f} MB, without a plan {no_plan / 1e6:.1f} MB")
