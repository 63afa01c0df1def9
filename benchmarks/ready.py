"""Arms of one model that are compiled before any of them is measured.

Compiling takes half a minute of one core, measuring a second or two of the GPU: so that several
processes can share a GPU, each compiles all that it will measure, and holds nothing of the device
meanwhile but the model.  Each arm is compiled by a backend of its own, as ``torch.compile`` tells
compiled code apart by it.  Its peak is that of steps with nothing in the allocator before; its time
that of steps in turn with those of another arm, so that what the machine does otherwise, and how
warm it is, is the same for both, and while Python collects no garbage.  ``ALLOCATOR_EVENTS`` names
a folder for the allocator's own events of one more step of an arm whose peak was predicted wrong,
``KERNEL_TIMES`` one for what the GPU did, and when, in a few more steps of each arm.
"""

from __future__ import annotations

import gc
import gzip
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from arms import done_by, off, predicted_of
from machine import describe_machine
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from turns import Gated, Turns, inductor

import offplan
from offplan.plan import Plan
from offplan.replay.arm import DrawnOn
from offplan.replay.compiled import build_real, loss_of
from offplan.target import load_target
from offplan.trace.backend import step_of

# Steps whose peak is read, after those that warm up.
WARM_UP, STEPS = 2, 2
# Steps of each of two arms that are timed: as many as take so long, of one arm, within these.  They
# are timed in rounds, each in memory that is asked for anew: the same plan differed by 1% from one
# process to another.
TIMED_MS, LEAST_PAIRS, MOST_PAIRS, ROUNDS = 3000.0, 12, 30, 3
# Steps of both whose kernels are kept.
PROFILED = 2
# A prediction of the peak that is further off has the allocator's own events kept beside it.
LOOK_AT = 0.003


@dataclass
class Arm:
    """``step`` is compiled.  ``enter`` makes the model what it was compiled as."""

    name: str
    step: Gated
    enter: Callable[[], None]
    backend: Any = None
    plan: Plan | None = None
    steps: int = 0

    def close(self) -> None:
        if self.backend is not None:
            self.backend.close()


class Ready:
    """A model on a device, and arms of its step."""

    def __init__(self, spec: str, params: dict[str, str], device: str) -> None:
        self.start = time.perf_counter()
        self.name = "-".join([Path(spec.split(":")[-1]).stem, *params.values()])
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self.turns = Turns(os.environ.get("GPU_LOCK"))
        # One code object has all arms.
        torch._dynamo.config.recompile_limit = 64
        with torch.device("meta"):
            # Imports what it needs, while another process may have its turn.
            load_target(spec, params)
        with self.turns.alone(), DrawnOn(self.device):
            torch.manual_seed(0)
            self.target = build_real(spec, params, self.device)
        self.layers = _layers(self.target.model)
        self.build_s = self.seconds()

    def seconds(self) -> float:
        """Since the process began with it."""
        return round(time.perf_counter() - self.start, 1)

    # --- arms -------------------------------------------------------------------------------------

    def by_itself(self, name: str) -> Arm:
        """As Inductor compiles it, with the settings that there are now."""
        return self._compiled(Arm(name, self._step(inductor()), self._not_checkpointed))

    def checkpointed(self, name: str, every: int) -> Arm:
        """The same with one of so many layers checkpointed."""
        enter = partial(self._checkpoint, every)
        return self._compiled(Arm(name, self._step(inductor()), enter))

    def planned(self, name: str, plan: Plan) -> Arm:
        backend = offplan.backend(plan, device=self.device)
        step = self._step(backend)
        return self._compiled(Arm(name, step, self._not_checkpointed, backend, plan))

    def _step(self, backend: Any) -> Gated:
        return Gated(step_of(self.target), backend)

    def _compiled(self, arm: Arm) -> Arm:
        arm.enter()
        arm.step.prepare(*self.target.args, **self.target.kwargs)
        return arm

    def _loss(self, arm: Arm) -> torch.Tensor:
        return loss_of(arm.step(*self.target.args, **self.target.kwargs))

    def _not_checkpointed(self) -> None:
        self._checkpoint(0)

    def _checkpoint(self, every: int) -> None:
        """Only attributes that are there anyway, so that nothing looks different to a guard."""
        for number, layer in enumerate(self.layers):
            layer.gradient_checkpointing = bool(every) and number % every == 0

    # --- measuring --------------------------------------------------------------------------------

    def measure(self, arm: Arm, beside: Arm) -> dict[str, Any]:
        """Its peak and step time, in turn with those of ``beside``, and what a plan predicts.

        In a quiet turn, which is the caller's: a group that has come to be measured is measured
        whole, however soon the machine is gone."""
        with _compiling_nothing():
            self._empty()
            for _ in range(WARM_UP):
                self._timed(arm)
            steps = [self._timed(arm) for _ in range(STEPS)]
            count = self._pairs(min(steps)[0])
            # Beside itself it only says how equal steps are; and on a CPU it is tried out.
            turns = ROUNDS if self.device.type == "cuda" and arm is not beside else 1
            rounds = [self._round(arm, beside, count) for _ in range(turns)]
            mine = [step_ms for pairs in rounds for step_ms, _ in pairs]
            others = [step_ms for pairs in rounds for _, step_ms in pairs]
            found: dict[str, Any] = {
                "name": arm.name,
                "step_ms": statistics.median(mine),
                "samples_ms": mine,
                "beside": {"name": beside.name, "step_ms": statistics.median(others)},
                "beside_samples_ms": others,
                "peak_allocated_bytes": max(peak for _, peak, _ in steps),
                "loss": steps[-1][2],
            }
            if arm.backend is not None:
                found["moved_bytes"] = arm.backend.stats().offloaded_bytes // arm.steps
            self._keep_kernels(arm, beside)
            self._empty()
        if arm.plan is None:
            return found
        found["predicted"] = predicted_of(arm.plan)
        found["does"] = done_by(arm.plan)
        again_bytes = sum(each.size_bytes for each in arm.plan.recomputed)
        found |= {"off": off(found), "recomputed_bytes": again_bytes}
        if abs(found["off"].get("peak_allocated_bytes", 0.0)) > LOOK_AT:
            self._keep_events(arm)
        return found

    def _round(self, arm: Arm, beside: Arm, count: int) -> list[tuple[float, float]]:
        """``count`` steps of both in turn, in memory that is asked for anew."""
        self._empty()
        with _collecting_nothing():
            for _ in range(WARM_UP):
                self._timed(beside)
                self._timed(arm)
            return [(self._timed(arm)[0], self._timed(beside)[0]) for _ in range(count)]

    def _pairs(self, step_ms: float) -> int:
        """How many steps of a round are timed."""
        if self.device.type == "cpu":
            return 1
        return min(max(round(TIMED_MS / step_ms), LEAST_PAIRS), MOST_PAIRS) // ROUNDS

    def _keep_events(self, arm: Arm) -> None:
        """What the allocator does in one more step, to be laid beside the prediction."""
        folder = os.environ.get("ALLOCATOR_EVENTS")
        if folder is None or self.device.type != "cuda":
            return
        self._empty()
        self._timed(arm)
        torch.cuda.memory._record_memory_history(context=None, max_entries=10**6)
        self._timed(arm)
        found = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
        events = [(event["action"], event.get("addr", 0), event["size"]) for event in found]
        _packed(Path(folder), self.name, arm, {"events": events})

    def _keep_kernels(self, arm: Arm, beside: Arm) -> None:
        """What the GPU does in more steps of both in turn: kernels and copies, with their streams.

        Each as its name (a number), stream, start and duration in microseconds."""
        folder = os.environ.get("KERNEL_TIMES")
        if folder is None or self.device.type != "cuda":
            return
        from torch.profiler import ProfilerActivity, profile

        steps = []
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(PROFILED):
                for each in (arm, beside):
                    steps.append((each.name, time.time_ns(), self._timed(each)[0], time.time_ns()))
        names: dict[str, int] = {}
        done = [
            (
                names.setdefault(event.name(), len(names)),
                event.device_resource_id(),
                event.start_ns() / 1000,
                event.duration_ns() / 1000,
            )
            for event in profiler.profiler.kineto_results.events()
            if event.device_type() == torch.autograd.DeviceType.CUDA
        ]
        _packed(Path(folder), self.name, arm, {"steps": steps, "names": list(names), "done": done})

    def _timed(self, arm: Arm) -> tuple[float, int, float]:
        """Milliseconds, peak in bytes, and the loss."""
        is_cuda = self.device.type == "cuda"
        arm.enter()
        arm.steps += 1
        self.target.model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        if is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = self._loss(arm)
        loss.backward()
        if is_cuda:
            torch.cuda.synchronize()
        step_ms = 1000 * (time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() if is_cuda else 0
        return step_ms, peak, float(loss.detach())

    def _empty(self) -> None:
        """Give back what an arm before left: gradients, the allocator's blocks, workspaces."""
        self.target.model.zero_grad(set_to_none=True)
        gc.collect()
        if self.device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()


def _packed(folder: Path, model: str, arm: Arm, found: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{model}-{arm.name.replace('%', '')}-{os.getpid()}.json.gz"
    with gzip.open(path, "wt", compresslevel=3) as output:
        json.dump({"machine": describe_machine(), **found}, output)


def _layers(model: torch.nn.Module) -> list[Any]:
    """The layers that transformers can checkpoint, ready for it."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    found = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for layer in found:
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        layer.gradient_checkpointing = False
    return found


@contextmanager
def _compiling_nothing() -> Iterator[None]:
    """Raises if something is compiled meanwhile: not what was, then, is measured."""
    before = counters["stats"]["unique_graphs"]
    yield
    if counters["stats"]["unique_graphs"] != before:
        raise RuntimeError("it was compiled again when it was measured")


@contextmanager
def _collecting_nothing() -> Iterator[None]:
    """What is there by now is looked through no more: it takes ten milliseconds of some steps."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


class Weights:
    """The parameters of a model that is only compiled as yet: without memory until they are drawn.

    Tracing and compiling look at shapes and strides alone.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.sizes = [p.untyped_storage().nbytes() for p in self.parameters]
        for parameter in self.parameters:
            parameter.untyped_storage().resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def draw(self) -> None:
        """The same values each time: matrices at random, vectors (norms) of ones."""
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter, size_bytes in zip(self.parameters, self.sizes, strict=True):
                parameter.untyped_storage().resize_(size_bytes)
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.02)
                else:
                    parameter.fill_(1.0)
