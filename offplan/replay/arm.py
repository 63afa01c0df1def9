"""One arm, in a process of its own: ``python -m offplan.replay.arm REQUEST.json RESULT.json``.

Builds the model, replays a plan for a warm-up and some more steps, reads what the allocator and the
runtime counted, and fingerprints losses, gradients and buffers.  Or traces a target, so that the
process that compares the arms needs no device.

1.  An arm replays its plan, or trains its target eagerly (``replay.eager``), moving nothing or what
    its hooks are told.  How host memory is pinned is tried before the model is built.
2.  The seed is set before the model is built, and to another known value before each step, so that
    the random-number state is the same in every arm.  Gradients are dropped before each step.
3.  Peaks are reset at the beginning of each step and read at its end, before fingerprints are
    taken, which then use memory that the step has given back.
4.  Where bits are verified, torch is asked for deterministic kernels but not held to it: strict
    determinism makes cuDNN's attention unavailable (``trace.attention``, rule 5), and the kernels
    would be others than the plan's.  What torch says about kernels that do not repeat is kept.
5.  Running out of memory is a result.  Everything else that goes wrong is a ``Failure``.

The process ends when its standard input does, that is, with the process that started it.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from offplan.errors import DeviceError, OffplanError, PlanError
from offplan.files import GRAPH_FILE, write_atomically
from offplan.fusion import as_run, is_fused
from offplan.graph import GraphFacts, load_graph, save_graph
from offplan.measured import Arm, Expected, Machine, OutOfMemory, Parts, Step, What
from offplan.memory import Conditions, Prediction, predict
from offplan.plan import load_plan
from offplan.replay.compiled import Replay, build_real, loss_of
from offplan.replay.eager import EagerReplay
from offplan.replay.fingerprint import fingerprints
from offplan.replay.gauge import (
    CpuGauge,
    CudaGauge,
    Gauge,
    Reading,
    input_tensors,
    own_tensors,
)
from offplan.replay.layout import laid_out_bytes
from offplan.replay.limits import HostMemoryError
from offplan.replay.measure import ArmError
from offplan.replay.messages import (
    Answer,
    ArmRequest,
    ArmResult,
    Failure,
    Fingerprint,
    OpTimesRequest,
    Request,
    Timed,
    Traced,
    TraceRequest,
    read_request,
    write_message,
)
from offplan.replay.optimes import (
    cache_op_times,
    cached_op_times,
    measured_op_times,
    timeable_keys,
)
from offplan.replay.parts import PartsWatch
from offplan.replay.pinning import Pinning, choose
from offplan.replay.runtime import RuntimeStats
from offplan.target import Target, describe, user_line
from offplan.trace._torch import TorchDispatchMode
from offplan.trace.capture import TraceOptions, trace

_SCALES = {"bytes": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
# Allocators other than CUDA's caching one raise plain RuntimeErrors.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "CUDA error: out of memory")
_DRAWS = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
_LARGE_ELEMENTS = 2**20
_OTHER_OPS = "if nothing changed, replay without deterministic kernels: --no-verify"


def main() -> None:
    """Answer the request in the first file in the second."""
    asked, answered = (Path(text) for text in sys.argv[1:3])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    write_message(answered, answer(read_request(asked)))


def answer(request: Request) -> Answer:
    """What is done about ``request``; a failure is an answer too."""
    try:
        if isinstance(request, TraceRequest):
            return _traced(request)
        if isinstance(request, OpTimesRequest):
            return _timed(request)
        return _Run(request).result()
    except OffplanError as error:
        traceback.print_exc()
        return Failure(exit_code=error.exit_code, what=error.what, where=error.where, fix=error.fix)
    except Exception as error:
        traceback.print_exc()
        return Failure(exit_code=1, what=describe(error), where=user_line(error))


def _end_with_parent() -> None:
    # Not through sys.stdin, whose lock the interpreter wants when it shuts down.
    while os.read(0, 1024):
        pass
    os._exit(1)


def _traced(request: TraceRequest) -> Traced:
    _device(request.device)
    options = TraceOptions(
        request.device,
        attention=request.attention,
        partitioner=request.partitioner,
        compiler=request.compiler,
    )
    with repeatable(request.verify):
        facts = trace(request.spec, request.params, options, choices=request.choices)
    write_atomically(request.graph, save_graph(facts), GRAPH_FILE)
    return Traced()


def _timed(request: OpTimesRequest) -> Timed:
    """Op times of the step, from the cache where they are all there."""
    device, facts = _device(request.device), load_graph(request.graph)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    version = torch.__version__ + (" deterministic" if request.verify else "")
    known = cached_op_times(gpu, version)
    if timeable_keys(facts) <= known.keys():
        return Timed(known)
    plan = load_plan(request.plan)
    torch.manual_seed(request.seed)
    try:
        with repeatable(request.verify), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with DrawnOn(device):
                target = build_real(plan.target.spec, plan.target.params, device)
            with Replay(target, plan, device=device) as replay:
                found = measured_op_times(replay, known)
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        return Timed(known, "the step does not fit without a plan: op times are not measured")
    cache_op_times(gpu, version, found)
    return Timed(found)


def _device(name: str) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        why = "" if torch.version.cuda else f": torch {torch.__version__} is not a CUDA build"
        raise DeviceError(f"there is no GPU to replay on{why}", fix="replay here with --device cpu")
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        raise DeviceError(
            f"CUDA cannot start on the GPU: {describe(error)}",
            fix="see nvidia-smi for who uses it",
        ) from error
    return torch.device("cuda", torch.cuda.current_device())


# --- one arm --------------------------------------------------------------------------------------


class _Run:
    """The steps of one arm; ``during`` says what it is doing, for a message."""

    def __init__(self, request: ArmRequest) -> None:
        self.request = request
        self.plan = load_plan(request.plan)
        self.device = _device(request.device)
        self.gauge: Gauge = CudaGauge(self.device) if self.device.type == "cuda" else CpuGauge()
        self.steps: list[Step] = []
        self.fingerprints: list[tuple[Fingerprint, ...]] = []
        self.during = ""
        self.pinning: Pinning | None = None
        self.pin = ""
        self.machine = machine_here(self.device)

    def result(self) -> ArmResult:
        start = time.perf_counter()
        self.build_s = 0.0
        self.expected: Expected | None = None
        parts, out = None, None
        with _heard_warnings() as heard, repeatable(self.request.verify):
            try:
                parts = self._steps(start)
            except Exception as error:
                if not _is_out_of_memory(error):
                    raise self._explained(error) from error
                traceback.print_exc()
                out = self._out_of_memory(error)
        arm = Arm(
            role="plan",
            outcome="completed" if out is None else "out of memory",
            out_of_memory=out,
            build_s=self.build_s,
            pin=self.pin,
            steps=tuple(self.steps),
            parts=parts,
            expected=self.expected,
        )
        return ArmResult(
            arm=arm,
            machine=self.machine,
            fingerprints=tuple(self.fingerprints),
            nondeterministic=tuple(nondeterministic(heard)),
            notes=() if self.pinning is None else self.pinning.notes,
        )

    def _steps(self, start: float) -> Parts:
        request = self.request
        self.during = "taking host memory"
        self.pinning = choose(request.pin, self.device, laid_out_bytes(self.plan.transfers))
        self.during = "building the model"
        torch.manual_seed(request.seed)
        with DrawnOn(self.device):
            target = build_real(self.plan.target.spec, self.plan.target.params, self.device)
        # Benchmarking could choose other kernels in another arm.
        torch.backends.cudnn.benchmark &= not request.verify
        self.gauge.settle(target)
        self.during = "preparing the replay"
        with self._replay(target, self.pinning) as replay:
            self.build_s = time.perf_counter() - start
            for number in range(1 + request.steps):
                self._step(number, target, replay)
            self.expected = self._expected(replay) if isinstance(replay, Replay) else None
            self.during = "the step that counts the parts of the peak"
            return self._parts(target, replay)

    def _replay(self, target: Target, pinning: Pinning) -> Replay | EagerReplay:
        request = self.request
        if request.engine == "compiled":
            return Replay(
                target,
                self.plan,
                device=self.device,
                host_budget=request.host_budget_bytes,
                pin=pinning,
                timing=True,
            )
        return EagerReplay(
            target,
            device=self.device,
            host_budget=request.host_budget_bytes,
            pin=pinning,
            timing=True,
            min_offload_bytes=self.plan.min_bytes,
            enabled=request.enabled,
        )

    def _step(self, number: int, target: Target, replay: Replay | EagerReplay) -> None:
        """One step, counted; then its fingerprints."""
        before = replay.stats()
        _reset(target, self.request.seed + 1 + number)
        with self.gauge.watching():
            self.during = f"the forward of step {number}"
            self.gauge.begin()
            loss = loss_of(replay.forward())
            self.during = f"the backward of step {number}"
            self.gauge.forward_ended()
            loss.backward()
            reading = self.gauge.ended()
        self.during = f"reading step {number}"
        found = fingerprints([("loss", "", loss)]) if self.request.verify else ()
        said = repr(loss.item())
        del loss
        after = replay.stats()
        if self.device.type == "cuda" and after.host_pinned_bytes and self.pinning is not None:
            self.pin = self.pinning.name
        self.steps.append(_counted(reading, said, self.gauge.held_bytes(), before, after))
        if self.request.verify:
            self.fingerprints.append((*found, *fingerprints(_compared(target))))

    def _expected(self, replay: Replay) -> Expected:
        """What the plan predicts of a step as it runs here: deterministic maybe, no optimizer."""
        assert replay.facts is not None
        here = Conditions(
            expandable_segments=self.plan.predicted.conditions.expandable_segments,
            deterministic=self.request.verify,
        )
        found = self._predicted(replay.facts, here)
        when = self.plan.predicted.time
        return Expected(
            peak_allocated_bytes=found.peak_bytes,
            peak_reserved_bytes=found.reserved_bytes,
            forward_end_bytes=found.forward_end_bytes,
            step_ms=None if when is None else when.step_ms,
        )

    def _predicted(self, facts: GraphFacts, here: Conditions) -> Prediction:
        planned = self.plan.predicted
        if facts.compiler != "inductor" or is_fused(facts):
            return predict(*as_run(facts, self.plan.transfers), here)
        # How it was lowered is known where it was traced only: the prediction from there, without
        # the optimizer.
        found = planned.plan
        absent_bytes = found.parts["optimizer"]
        return msgspec.structs.replace(
            found,
            peak_bytes=found.peak_bytes - absent_bytes,
            reserved_bytes=found.reserved_bytes - absent_bytes,
            forward_end_bytes=found.forward_end_bytes - absent_bytes,
        )

    def _parts(self, target: Target, replay: Replay | EagerReplay) -> Parts:
        _reset(target, self.request.seed)
        with PartsWatch(self.device, own_tensors(target), input_tensors(target)) as watch:
            loss = loss_of(replay.forward())
            watch.forward_ended()
            loss.backward()
        return watch.parts(
            parameter.grad for parameter in target.model.parameters() if parameter.grad is not None
        )

    def _explained(self, error: Exception) -> OffplanError:
        if isinstance(error, PlanError) and "other graphs" in error.what and self.request.verify:
            # A few functions of torch, such as interpolation, are other ops in this mode.
            error.fix = "; ".join(filter(None, (error.fix, _OTHER_OPS)))
        if isinstance(error, OffplanError):
            return error
        refused = next((e for e in _causes(error) if isinstance(e, HostMemoryError)), None)
        if refused is not None:
            return refused
        return ArmError(f"{self.during} failed: {describe(error)}", where=user_line(error))

    def _out_of_memory(self, error: Exception) -> OutOfMemory:
        asked = re.search(r"[Tt]ried to allocate ([\d.]+) (\w+)", str(error))
        asked_bytes = int(float(asked[1]) * _SCALES[asked[2]]) if asked else None
        return OutOfMemory(
            during=self.during,
            op=_op_of(error),
            allocated_bytes=self.gauge.most_bytes(),
            asked_bytes=asked_bytes,
            device_bytes=self.machine.gpu_memory_bytes or None,
        )


def _reset(target: Target, seed: int) -> None:
    """No gradients, and a known random-number state."""
    for tensor in (*target.model.parameters(), *input_tensors(target)):
        tensor.grad = None
    torch.manual_seed(seed)


def _compared(target: Target) -> Iterator[tuple[What, str, torch.Tensor]]:
    for name, parameter in target.model.named_parameters():
        if parameter.grad is not None:
            yield "gradient", name, parameter.grad
    for name, buffer in target.model.named_buffers():
        yield "buffer", name, buffer


def _counted(
    reading: Reading, loss: str, end_bytes: int, before: RuntimeStats, after: RuntimeStats
) -> Step:
    stalled = None
    if after.stalled_ms is not None:
        stalled = after.stalled_ms - (before.stalled_ms or 0.0)
    return Step(
        loss=loss,
        step_ms=reading.forward_ms + reading.backward_ms,
        forward_ms=reading.forward_ms,
        backward_ms=reading.backward_ms,
        peak_allocated_bytes=reading.peak_allocated_bytes,
        peak_reserved_bytes=reading.peak_reserved_bytes,
        forward_end_bytes=reading.forward_end_bytes,
        end_bytes=end_bytes,
        host_bytes=after.host_pinned_bytes,
        to_host_bytes=after.offloaded_bytes - before.offloaded_bytes,
        to_device_bytes=after.reloaded_bytes - before.reloaded_bytes,
        to_host_count=after.offload_count - before.offload_count,
        to_device_count=after.reload_count - before.reload_count,
        stalled_ms=stalled,
    )


class DrawnOn(TorchDispatchMode):
    """Draws the random numbers of large CPU tensors on the GPU, where a model is first built.

    A CPU draws some 100 million a second, so that a 14B-parameter model would take minutes.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _DRAWS or self.device.type == "cpu" or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        tensor, *numbers = args
        if tensor.device.type != "cpu" or tensor.numel() < _LARGE_ELEMENTS:
            return func(*args, **kwargs)
        drawn = torch.empty_like(tensor, device=self.device)
        return tensor.copy_(func(drawn, *numbers, **kwargs))


# --- what torch says ------------------------------------------------------------------------------


@contextmanager
def repeatable(wanted: bool) -> Iterator[None]:
    """Deterministic kernels, where there are any (definition 4)."""
    if not wanted:
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    # It would fill every tensor of empty memory: time that no other run spends.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


@contextmanager
def _heard_warnings() -> Iterator[list[str]]:
    """Warnings as they come; they are printed too, and so reach the file of what was said."""
    heard: list[str] = []
    show = warnings.showwarning

    def hear(message: Warning | str, *rest: Any, **more: Any) -> None:
        heard.append(str(message))
        show(message, *rest, **more)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = hear
        yield heard


def nondeterministic(heard: list[str]) -> Iterator[str]:
    """The first sentence of each warning about a kernel that does not repeat its results."""
    for words in dict.fromkeys(heard):
        if "determinis" in words and "use_deterministic_algorithms" in words:
            yield words.split(", but")[0].split(". ")[0].split("\n")[0]


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had no memory left.  Where the host had none, CUDA says the same words."""
    if any(isinstance(cause, HostMemoryError) for cause in _causes(error)):
        return False
    return any(_means_out_of_memory(cause) for cause in _causes(error))


def _means_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _op_of(error: BaseException) -> str:
    """The op that ran when ``error`` was raised, from the line of the graph's code; or nothing."""
    for cause in _causes(error):
        for frame in reversed(traceback.extract_tb(cause.__traceback__)):
            op = re.search(r"torch\.ops\.([\w.]+)\(", frame.line or "")
            if op is not None and frame.filename.startswith("<eval_with_key>"):
                return op[1]
    return ""


def machine_here(device: torch.device) -> Machine:
    found = {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "torch": torch.__version__.split("+")[0],
    }
    if device.type == "cpu":
        return Machine(**found)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return Machine(
        **found,
        gpu=torch.cuda.get_device_name(device),
        gpu_memory_bytes=total_bytes,
        used_bytes=total_bytes - free_bytes,
        cuda=torch.version.cuda or "",
        cudnn=str(torch.backends.cudnn.version() or ""),
    )


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
