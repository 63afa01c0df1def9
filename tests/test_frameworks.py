"""Trainers that own the loop: Hugging Face's Trainer, Accelerate and Lightning; and the examples.

Each trains a small model on the CPU that torch's compiler has compiled, and one that a backend has
that moves everything, and must come to the same losses and parameters bit for bit.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training_loops import Net, assert_same, batch, loss_of, small_backend

from offplan.trace._torch import reset_dynamo

ROOT = Path(__file__).parent.parent
STEPS = 3

pytestmark = [
    pytest.mark.xdist_group("frameworks"),
    # Theirs: deprecated names, few workers for data, no GPU.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    reset_dynamo()


Trained = dict[str, torch.Tensor]


def assert_trains(train: Callable[[Any], Trained]) -> int:
    """``train(backend)`` gives the same with and without a plan; returns how many forwards moved
    something."""
    reset_dynamo()
    expected = train("aot_eager")
    reset_dynamo()
    with small_backend(budget=0) as made:
        found = train(made)
        leases = made.stats().lease_count
    assert_same(found, expected)
    return leases


def parameters(model: nn.Module) -> Trained:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# --- Hugging Face's Trainer -----------------------------------------------------------------------


def qwen() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="the model is from transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        use_cache=False,
    )
    return transformers.Qwen3ForCausalLM(config)


def chunks(count: int = 24) -> list[dict[str, torch.Tensor]]:
    drawn = torch.randint(64, (count, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in drawn]


def trainer_for(model: nn.Module, output: Path, **arguments: Any) -> Any:
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    from transformers import Trainer, TrainingArguments

    given = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 0,
    } | arguments
    return Trainer(
        model,
        TrainingArguments(str(output), **given),
        train_dataset=chunks(),
        eval_dataset=chunks(4),
    )


def logged(trainer: Any) -> Trained:
    """The losses that it logged, in training and in evaluation, and the norms of gradients."""
    return {
        f"{name} {place}": torch.tensor(float(entry[name]))
        for place, entry in enumerate(trainer.state.log_history)
        for name in ("loss", "grad_norm", "eval_loss")
        if name in entry
    }


@pytest.mark.parametrize(
    ("arguments", "leases"),
    [
        ({}, STEPS),
        ({"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}, 2 * STEPS),
        ({"eval_strategy": "steps", "eval_steps": 1}, STEPS),
        ({"bf16": True}, STEPS),
        ({"gradient_checkpointing": True}, STEPS),
    ],
    ids=["plain", "accumulation", "evaluation", "bf16", "checkpointing"],
)
def test_the_trainer_trains_a_model_that_was_compiled_in_place(arguments, leases, tmp_path):
    def train(chosen: Any) -> Trained:
        model = qwen()
        model.compile(backend=chosen, dynamic=False)
        trainer = trainer_for(model, tmp_path, **arguments)
        trainer.train()
        found = logged(trainer)
        assert len(found) >= 2 * STEPS
        return found | parameters(model)

    assert assert_trains(train) == leases


def test_the_trainer_saves_and_goes_on(tmp_path):
    def train(chosen: Any) -> Trained:
        output = tmp_path / ("plan" if not isinstance(chosen, str) else "bare")
        saving = {"save_strategy": "steps", "save_steps": 2}
        model = qwen()
        model.compile(backend=chosen, dynamic=False)
        trainer_for(model, output, **saving).train()
        resumed = qwen()
        resumed.compile(backend=chosen, dynamic=False)
        trainer = trainer_for(resumed, output, **saving)
        trainer.train(resume_from_checkpoint=str(output / "checkpoint-2"))
        assert_same(parameters(resumed), parameters(model))
        return parameters(resumed)

    assert assert_trains(train) == STEPS + 1


def test_the_trainer_takes_only_names_that_accelerate_lists(tmp_path):
    """Once this fails, ``torch_compile_backend="offplan"`` works, and the README can say so."""
    with pytest.raises(ValueError, match="'OFFPLAN' is not a valid DynamoBackend"):
        trainer_for(qwen(), tmp_path, torch_compile_backend="offplan")


# --- Accelerate -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize("order", ["compiled, prepared", "prepared, compiled"])
def test_accelerate(order, mixed_precision):
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")

    def train(chosen: Any) -> Trained:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision=mixed_precision, gradient_accumulation_steps=2
        )
        torch.manual_seed(0)
        model = Net()
        if order == "compiled, prepared":
            model.compile(backend=chosen)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        call, optimizer = accelerator.prepare(model, optimizer)
        if order == "prepared, compiled":
            call = torch.compile(call, backend=chosen)
        found: Trained = {}
        for step in range(4):
            with accelerator.accumulate(call):
                loss = loss_of(call(batch(step)))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(call.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            found[f"loss {step}"] = loss.detach()
        unwrapped = accelerator.unwrap_model(call, keep_torch_compile=False)
        assert type(unwrapped) is Net
        return found | parameters(unwrapped)

    assert assert_trains(train) == 4


# --- Lightning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("inside", [False, True], ids=["module", "model"])
def test_lightning(inside, precision, tmp_path):
    lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning")
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.losses: list[torch.Tensor] = []

        def training_step(self, rows: torch.Tensor, number: int) -> torch.Tensor:
            return loss_of(self.net(rows))

        def on_train_batch_end(self, outputs: Any, *rest: Any) -> None:
            self.losses.append(outputs["loss"].detach().clone())

        def validation_step(self, rows: torch.Tensor, number: int) -> torch.Tensor:
            return loss_of(self.net(rows))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train(chosen: Any) -> Trained:
        torch.manual_seed(0)
        module = Module()
        if inside:
            module.net.compile(backend=chosen)
        rows = torch.cat([batch(step) for step in range(4)])
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            precision=precision,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(
            module if inside else torch.compile(module, backend=chosen),
            DataLoader(rows, batch_size=32),
            DataLoader(rows, batch_size=32),
        )
        assert len(module.losses) == 4
        return {f"loss {i}": loss for i, loss in enumerate(module.losses)} | parameters(module)

    assert assert_trains(train) == 4


# --- the examples ---------------------------------------------------------------------------------


def run_example(name: str, *options: str) -> str:
    found = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *options],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def moved_and_peaks(printed: str) -> tuple[list[float], list[tuple[float, float]]]:
    moved = [float(size) for size in re.findall(r"([\d.]+) MB moved", printed)]
    peaks = re.findall(r"predicted peak ([\d.]+) MB, without a plan ([\d.]+) MB", printed)
    return moved, [(float(peak), float(without)) for peak, without in peaks]


def test_the_example_of_a_plain_loop_trains_within_its_budget():
    small = ("--device", "cpu", "--compiler", "aot_eager")
    printed = run_example("train_loop.py", *small, "--budget", "floor")
    moved, [(peak, without)] = moved_and_peaks(printed)
    assert len(set(moved)) == 1
    assert moved[0] > 0
    assert peak < without
    bare = run_example("train_loop.py", *small)
    assert moved_and_peaks(bare) == ([0.0] * 4, [])
    losses = re.findall(r"loss [\d.]+", printed)
    assert losses == re.findall(r"loss [\d.]+", bare)
    assert len(losses) == 4


def test_the_example_of_a_trainer_trains_within_its_budget():
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    printed = run_example("trainer.py", "--cpu", "--compiler", "aot_eager", "--budget", "80%")
    moved, [(peak, without)] = moved_and_peaks(printed)
    assert moved[0] > 0
    assert peak <= 0.8 * without
