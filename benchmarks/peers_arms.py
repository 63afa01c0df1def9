"""The arms of ``peers.py``, measured in a process of its own: what each does to a model's step.

1.  A *part* measures a baseline, and then each *way* that it is asked for, on one model.
2.  Ways under a compiler are all compiled first, in company, without running: nothing of them is on
    the device but the model.  Then the process has the machine to itself until all are measured.
    Eager ways need no compiling; the host memory of the first is pinned in company.
3.  Two warm-up steps, whose gradients' norms are read; then five timed ones, or three where one
    takes over a second.  Peaks are those of the timed steps; losses are read of all.  Step n has
    seed n, so that dropout draws the same in each eager arm.
4.  A way that fails, is refused, or runs out of memory says so, and the others go on.

Other projects' code is imported from where it is installed, and named with its version.  Where a
package cannot be imported for want of what this needs nothing of, the one module that is needed is
loaded from its file.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import math
import os
import statistics
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from turns import Gated, Turns, inductor

import offplan
from offplan.errors import OffplanError
from offplan.replay.arm import DrawnOn
from offplan.replay.compiled import build_real, loss_of
from offplan.replay.eager import EagerReplay
from offplan.replay.gauge import CpuGauge, CudaGauge
from offplan.trace.backend import step_of

WARM_UP, STEPS, SLOW_STEPS = 2, 5, 3
SLOW_MS = 1000.0
# A way that hangs must not keep the others from the machine.
MOST_DEEPCOMPILE_S = 300

Forward = Callable[[], Any]


@dataclass(frozen=True)
class Asked:
    """What the process is to measure: names of ways, and budgets of those of offplan."""

    budgets: Mapping[str, int | None]
    plans: Path | None = None
    until_s: float | None = None

    @classmethod
    def read(cls) -> Asked:
        found = json.loads(os.environ["PEERS_ASKED"])
        plans = found.get("plans")
        return cls(found["arms"], Path(plans) if plans else None, found.get("until_s"))

    @property
    def is_late(self) -> bool:
        return self.until_s is not None and time.time() > self.until_s


class NotHereError(Exception):
    """A way that this machine cannot measure, with the reason."""


# --- the model, and how an arm is measured --------------------------------------------------------


class Bench:
    """A model and its inputs on a device, and the steps of one way after another."""

    def __init__(self, spec: str, params: dict[str, str], device: str, asked: Asked) -> None:
        self.spec, self.params, self.asked = spec, params, asked
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self.turns = Turns(os.environ.get("GPU_LOCK"))
        torch.manual_seed(0)
        with self.turns.compiling(), self.turns.alone(), DrawnOn(self.device):
            self.target = build_real(spec, params, self.device)
        self.step = step_of(self.target)
        self.baseline: dict[str, Any] | None = None

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def run(self) -> Any:
        return self.step(*self.target.args, **self.target.kwargs)

    def reset(self, seed: int) -> None:
        self.target.model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)

    def empty(self) -> None:
        """Give back what a way before left: gradients, the allocator's blocks, workspaces."""
        self.reset(0)
        gc.collect()
        if self.is_gpu:
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def measured(self, forward: Forward, moved_bytes: Callable[[], int]) -> dict[str, Any]:
        """Peak, step, losses and gradients' norms of ``forward`` and the backward after it.

        ``moved_bytes`` counts from some moment on.
        """
        gauge = CudaGauge(self.device) if self.is_gpu else CpuGauge()
        gauge.settle(self.target)
        readings, losses, norms = [], [], []
        count, number = WARM_UP + STEPS, 0
        while number < count:
            self.reset(number)
            if number == WARM_UP:
                rest_bytes, before_bytes = gauge.held_bytes(), moved_bytes()
            with gauge.watching():
                gauge.begin()
                loss = loss_of(forward())
                gauge.forward_ended()
                loss.backward()
                reading = gauge.ended()
            losses.append(float(loss.detach()))
            del loss
            if number < WARM_UP:
                norms.append(self._gradient_norm())
            readings.append(reading)
            if number == WARM_UP and reading.forward_ms + reading.backward_ms > SLOW_MS:
                count = WARM_UP + SLOW_STEPS
            number += 1
        steady = readings[WARM_UP:]
        times = [reading.forward_ms + reading.backward_ms for reading in steady]
        return {
            "peak_allocated_bytes": max(r.peak_allocated_bytes for r in steady),
            "peak_reserved_bytes": max(r.peak_reserved_bytes or 0 for r in steady),
            "rest_bytes": rest_bytes,
            "moved_bytes": (moved_bytes() - before_bytes) // len(steady),
            "step_ms": statistics.median(times),
            "samples_ms": times,
            "losses": losses,
            "gradient_norms": norms,
        }

    def _gradient_norm(self) -> float:
        """Of all gradients together; in float32 each, whatever they are in."""
        gradients = [p.grad for p in self.target.model.parameters() if p.grad is not None]
        squares = [
            torch.linalg.vector_norm(g, dtype=torch.float32).double().square() for g in gradients
        ]
        return math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0

    def arm(self, way: Way, found: dict[str, Any]) -> dict[str, Any]:
        """What is printed of a measured way; the first is the baseline of all."""
        if self.baseline is None:
            names = ("peak_allocated_bytes", "step_ms")
            self.baseline = {"name": way.name, **{name: found[name] for name in names}}
        budget_bytes = self.asked.budgets.get(way.name)
        told = {"budget_bytes": budget_bytes} if budget_bytes else {}
        return {
            "name": way.name,
            "engine": way.engine,
            **found,
            **told,
            **way.said,
            "baseline": self.baseline,
        }


@dataclass
class Way:
    """One way to run the step.  ``said`` is filled in as it is found out.

    ``placed`` is active while it compiles and runs; ``eager`` makes the forward of one without a
    compiler, ``backend`` the backend of one with.
    """

    name: str
    engine: str
    placed: Callable[[], AbstractContextManager[Any]] = nullcontext
    eager: Callable[[], Forward] | None = None
    backend: Callable[[], Any] | None = None
    moved_bytes: Callable[[], int] = lambda: 0
    close: Callable[[], None] = lambda: None
    said: dict[str, Any] = field(default_factory=dict)


def part(bench: Bench, ways: Sequence[Way]) -> Iterator[dict[str, Any]]:
    """The arms of a part; the first way is the baseline."""
    failed: dict[str, str] = {}
    is_compiled = ways[0].eager is None
    calls: dict[str, Gated] = {}
    with bench.turns.compiling():
        if is_compiled:
            calls = _compiled(bench, ways, failed)
        else:
            _pinned(bench, ways, failed)
    with bench.turns.quiet():
        for way in ways:
            if way.name not in failed and (way.name in calls or not is_compiled):
                with _reported(way, failed):
                    yield {"arm": bench.arm(way, _run(bench, way, calls.pop(way.name, None)))}
                way.close()
                bench.empty()
            if bench.baseline is None or bench.asked.is_late:
                # Without a baseline nothing can be said of the others.
                break
    yield {"not_measured": failed}


@contextmanager
def _reported(way: Way, failed: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        failed[way.name] = "out of memory: " + str(error).split(". ")[0]
    except Exception as error:
        failed[way.name] = _why(error)
    if way.name in failed:
        print(f"{way.name}: {failed[way.name]}", file=sys.stderr, flush=True)


def _why(error: BaseException) -> str:
    """The first line of what went wrong at the root."""
    # torch names what its backend raised, and tells of no cause.
    while inner := getattr(error, "inner_exception", None) or error.__cause__:
        error = inner
    lines = str(error).strip().splitlines() or [""]
    told = lines[0][:200]
    if isinstance(error, NotHereError | OffplanError):
        return told
    return f"{type(error).__name__}: {told}"


def _run(bench: Bench, way: Way, call: Gated | None) -> dict[str, Any]:
    bench.empty()
    with way.placed():
        if call is None:
            assert way.eager is not None
            forward = way.eager()
        else:
            forward = partial(call, *bench.target.args, **bench.target.kwargs)
        return bench.measured(forward, way.moved_bytes)


def _pinned(bench: Bench, ways: Sequence[Way], failed: dict[str, str]) -> None:
    """A step of the first way that pins, whose host memory those after it use again."""
    first = next((way for way in ways if way.name == "save_on_cpu"), None)
    if first is None or first.eager is None or not bench.is_gpu:
        return
    with _reported(first, failed):
        loss_of(first.eager()()).backward()
        torch.cuda.synchronize()
    bench.empty()


# --- compiling without running --------------------------------------------------------------------


def _compiled(bench: Bench, ways: Sequence[Way], failed: dict[str, str]) -> dict[str, Gated]:
    """Every way that compiles, forward and backward, by name."""
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config

    dynamo_config.recompile_limit = 4 * len(ways) + 8
    found = {}
    for way in ways:
        if bench.asked.is_late:
            break
        # A pass on the joint graph is no part of the key of autograd's cache.
        uncached = functorch_config.patch(enable_autograd_cache=False)
        with _reported(way, failed), way.placed(), uncached:
            assert way.backend is not None
            start = time.perf_counter()
            call = Gated(bench.step, way.backend())
            bench.reset(0)
            call.prepare(*bench.target.args, **bench.target.kwargs)
            way.said["compile_s"] = round(time.perf_counter() - start, 1)
            found[way.name] = call
    bench.empty()
    return found


# --- checkpointing --------------------------------------------------------------------------------

_aten = torch.ops.aten
# What selective checkpointing keeps: products and attention, which are dear to compute again.
KEPT_OPS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def blocks_of(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Parent, name and block of what repeats: the layers of transformers, or of any module list."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    pairs = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
    ]
    layers = [each for each in pairs if isinstance(each[2], GradientCheckpointingLayer)]
    return layers or [each for each in pairs if isinstance(each[0], nn.ModuleList)]


def checkpointed(
    model: nn.Module, every: int, *, keeps: Sequence[Any] = ()
) -> Callable[[], AbstractContextManager[None]]:
    """Every n-th block is checkpointed while it is active, but for what the ops ``keeps`` make."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        checkpoint_wrapper,
    )
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    contexts = partial(create_selective_checkpoint_contexts, list(keeps))
    wrapped = []
    for parent, name, block in blocks_of(model)[::every]:
        more = {"context_fn": contexts} if keeps else {}
        wrapper = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **more)
        wrapped.append((parent, name, block, wrapper))
    if not wrapped:
        raise NotHereError("the model has no blocks that repeat")

    @contextmanager
    def placed() -> Iterator[None]:
        for parent, name, _, wrapper in wrapped:
            setattr(parent, name, wrapper)
        try:
            yield
        finally:
            for parent, name, block, _ in wrapped:
                setattr(parent, name, block)

    return placed


_CHECKPOINTED: dict[str, tuple[int, Sequence[Any]]] = {
    "all layers": (1, ()),
    "one of 2 layers": (2, ()),
    "selective": (1, KEPT_OPS),
}


def checkpoint_way(bench: Bench, name: str) -> Way:
    every, keeps = _CHECKPOINTED[name.split("checkpointing ")[1]]
    placed = checkpointed(bench.target.model, every, keeps=keeps)
    if name.startswith("eager"):
        return Way(name, "eager", placed, eager=lambda: bench.run)
    return Way(name, "inductor", placed, backend=inductor)


# --- eager peers ----------------------------------------------------------------------------------


def eager_way(bench: Bench, name: str) -> Way:
    return Way(name, "eager", eager=lambda: bench.run)


def hooked_way(bench: Bench, name: str) -> Way:
    """A peer that is entered around the forward."""
    enter = {"save_on_cpu": _save_on_cpu, "torchtune": _torchtune, "TRL": _trl}[name]
    way = Way(name, "eager")
    way.placed = partial(_without_new_hooks, bench.target.model)

    def forward() -> Forward:
        hooks = enter(bench, way.said)

        def run() -> Any:
            with hooks:
                return bench.run()

        return run

    way.eager = forward
    return way


def _save_on_cpu(bench: Bench, said: dict[str, Any]) -> AbstractContextManager[Any]:
    from torch.autograd.graph import save_on_cpu

    return save_on_cpu(pin_memory=bench.is_gpu)


def _torchtune(bench: Bench, said: dict[str, Any]) -> AbstractContextManager[Any]:
    _needs_gpu(bench)
    module = _module("torchtune", "training/_activation_offloading.py", said, _TORCHTUNE_NEEDS)
    return module.OffloadActivations(use_pin_memory=True, use_streams=True)


def _trl(bench: Bench, said: dict[str, Any]) -> AbstractContextManager[Any]:
    _needs_gpu(bench)
    module = _module("trl", "models/activation_offloading.py", said, {})
    return module.get_act_offloading_ctx_manager(
        bench.target.model, use_pin_memory=True, use_streams=True, warn_if_no_head=False
    )


def _needs_gpu(bench: Bench) -> None:
    if not bench.is_gpu:
        raise NotHereError("needs a GPU: it copies on CUDA streams")


@contextmanager
def _without_new_hooks(model: nn.Module) -> Iterator[None]:
    """Takes back hooks that a peer leaves on modules, which other ways must not meet."""
    places = [
        (hooks, set(hooks))
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
    ]
    try:
        yield
    finally:
        for hooks, before in places:
            for key in [key for key in hooks if key not in before]:
                del hooks[key]


# What torchtune's module imports beside torch, for 4-bit weights, tied heads and its log: none of
# it is used for a model that has none of these.
_TORCHTUNE_NEEDS = {
    "torchao": {"__version__": "0"},
    "torchao.dtypes": {},
    "torchao.dtypes.nf4tensor": {"NF4Tensor": type("NF4Tensor", (), {})},
    "torchtune": {},
    "torchtune.modules": {"TiedLinear": type("TiedLinear", (), {})},
    "torchtune.utils": {"get_logger": lambda level: warnings},
}


def _module(
    package: str, path: str, said: dict[str, Any], needs: Mapping[str, Mapping[str, Any]]
) -> Any:
    """A module of an installed package, imported, or else loaded from its file.

    Raises ``NotHereError`` if the package is not installed.
    """
    name = f"{package}.{path.removesuffix('.py').replace('/', '.')}"
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise NotHereError(f"{package} is not installed")
    said["version"] = f"{package} {version(package)}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except Exception as error:
        said["loaded"] = f"from its file alone: {_why(error)}"
    file = Path(found.submodule_search_locations[0]) / path
    with _stood_in(package, needs):
        spec = importlib.util.spec_from_file_location(f"peers_{package}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@contextmanager
def _stood_in(package: str, needs: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Modules that are imported, and of which nothing is used, while it is active."""
    before = {name: sys.modules.get(name) for name in needs}
    for name, members in needs.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


# --- compiled peers -------------------------------------------------------------------------------


def inductor_way(bench: Bench, name: str) -> Way:
    return Way(name, "inductor", backend=inductor)


def memory_budget_way(bench: Bench, name: str) -> Way:
    share = float(name.split()[-1])
    placed = partial(_functorch, activation_memory_budget=share)
    return Way(name, "inductor", placed, backend=inductor)


def pass_way(bench: Bench, name: str) -> Way:
    """PyTorch's own pass, in line or on streams of its own.  It moves only what is marked: here
    everything is, and it moves what it can."""
    wanted = {"enable_activation_offloading": True, "joint_custom_pass": _mark_all}
    if name.endswith("streams"):
        overlaps = (
            "activation_offload_separate_stream",
            "activation_offload_sink_wait",
            "activation_reload_prefetch",
        )
        wanted |= dict.fromkeys(overlaps, True)
    return Way(name, "inductor", partial(_functorch, **wanted), backend=inductor)


def _mark_all(module: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.meta["should_offload"] = True
    return module


@contextmanager
def _functorch(**wanted: Any) -> Iterator[None]:
    """Settings of functorch while it is active; this torch may not have them."""
    import torch._functorch.config as config

    for name in wanted:
        if not hasattr(config, name):
            raise NotHereError(f"torch {torch.__version__} has no {name}")
    with config.patch(**wanted):
        yield


# --- offplan --------------------------------------------------------------------------------------


# What plans may do.  Op by op, nothing is computed again: peers of eager models do not, either.
ACTIONS_OF = {"inductor": ("keep", "recompute", "offload"), "aot_eager": ("keep", "offload")}


def hooks_way(bench: Bench, name: str) -> Way:
    """The eager engine.  It has no plan: a budget is what host memory it may take, the bytes that
    are wanted off the device."""
    way = Way(name, "eager")
    replays: list[EagerReplay] = []

    def forward() -> Forward:
        budget_bytes = bench.asked.budgets[name]
        assert bench.baseline is not None
        host_bytes = None
        if budget_bytes is not None:
            host_bytes = max(0, bench.baseline["peak_allocated_bytes"] - budget_bytes)
        replay = EagerReplay(bench.target, device=bench.device, host_budget=host_bytes)
        replays.append(replay)
        way.moved_bytes = lambda: replay.stats().offloaded_bytes
        return replay.forward

    def close() -> None:
        for replay in replays:
            replay.close()
        replays.clear()

    way.eager, way.close = forward, close
    return way


def planned_way(bench: Bench, name: str) -> Way:
    """A plan: one that was made before, where there is its file, or made as it is compiled."""
    engine = "inductor" if "Inductor" in name else "aot_eager"
    made: list[offplan.Backend] = []
    way = Way(name, engine)

    def backend() -> Any:
        path = None
        if bench.asked.plans is not None:
            path = bench.asked.plans / plan_name(bench.spec, bench.params, name)
        if path is None or not path.exists():
            path = None
        found = offplan.backend(
            path,
            budget=bench.asked.budgets[name] or "floor",
            actions=ACTIONS_OF[engine] if path is None else None,
            compiler=engine,
            device=bench.device,
            on_unknown="keep" if path is None else "replan",
        )
        made.append(found)
        return found

    def moved_bytes() -> int:
        # The backend's own plans; it has none where the plan was the graph's.
        way.said["planned"] = "as it was compiled" if made[-1].plans else "beforehand"
        return made[-1].stats().offloaded_bytes

    def close() -> None:
        for each in made:
            each.close()

    way.backend, way.moved_bytes, way.close = backend, moved_bytes, close
    return way


def aot_way(bench: Bench, name: str) -> Way:
    """The same graphs, moving nothing."""

    def backend() -> Any:
        return offplan.backend(compiler="aot_eager", device=bench.device)

    return Way(name, "aot_eager", backend=backend)


def plan_name(spec: str, params: Mapping[str, str], name: str) -> str:
    """The file of the plan of an arm."""
    words = [spec.split(":")[-1].split("/")[-1].removesuffix(".py"), *params.values(), name]
    text = "-".join(words).lower()
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in text) + ".plan.yaml"


# --- DeepSpeed ------------------------------------------------------------------------------------


def deepcompile(bench: Bench, name: str) -> Iterator[dict[str, Any]]:
    """DeepCompile as its engine runs it: ZeRO-3 of one process, and SGD that changes nothing.

    The step is forward and backward; the optimizer's own is not timed.  Everything that its pass
    may move is, until step 5, when its planner would give back what fits the whole GPU: steps 2 to
    4 are timed.  The process ends after ``MOST_DEEPCOMPILE_S``, whatever it does.
    """
    failed: dict[str, str] = {}
    way = Way(name, "deepcompile")
    watch = threading.Timer(MOST_DEEPCOMPILE_S, _give_up, (name,))
    watch.daemon = True
    with _reported(way, failed):
        _needs_gpu(bench)
        if importlib.util.find_spec("deepspeed") is None:
            raise NotHereError("deepspeed is not installed")
        way.said["version"] = f"deepspeed {version('deepspeed')}"
        with ExitStack() as stack:
            stack.enter_context(bench.turns.compiling())
            watch.start()
            stack.callback(watch.cancel)
            found = _deepspeed_steps(bench, "offload" in name, way.said, stack)
        yield {"arm": bench.arm(way, found)}
    yield {"not_measured": failed}


def _give_up(name: str) -> None:
    import psutil

    why = f"did not finish within {MOST_DEEPCOMPILE_S} s"
    print(json.dumps({"not_measured": {name: why}}), flush=True)
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(0)


def _deepspeed_steps(
    bench: Bench,
    offloads: bool,
    said: dict[str, Any],
    stack: ExitStack,
) -> dict[str, Any]:
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    # Its op is built as it is first used; of the compilers, only minor versions differ.  It reads
    # numbers alone in the list of architectures, where others may say "9.0a".
    architecture = ".".join(map(str, torch.cuda.get_device_capability()))
    built = {"DS_SKIP_CUDA_CHECK": "1", "MAX_JOBS": "8", "TORCH_CUDA_ARCH_LIST": architecture}
    os.environ.update({**alone, **built, "MASTER_PORT": str(_free_port())})
    import deepspeed

    deepspeed.init_distributed("nccl", auto_mpi_discovery=False)
    model = bench.target.model
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "bf16": {"enabled": next(model.parameters()).dtype == torch.bfloat16},
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "compile": {"deepcompile": True, "offload_activation": offloads},
        },
    )
    engine.compile()
    if not engine.is_deepcompile_active():
        raise NotHereError("deepspeed did not make DeepCompile active")
    gauge = CudaGauge(bench.device)
    readings, losses, norms = [], [], []
    for number in range(WARM_UP + SLOW_STEPS):
        torch.manual_seed(number)
        if number == WARM_UP:
            # Everything is compiled: waiting for the machine is no fault of it, and it keeps no
            # other from it.
            stack.close()
            stack.enter_context(bench.turns.quiet())
        rest_bytes = gauge.held_bytes()
        gauge.begin()
        loss = loss_of(engine(*bench.target.args, **bench.target.kwargs))
        gauge.forward_ended()
        engine.backward(loss)
        readings.append(gauge.ended())
        losses.append(float(loss.detach()))
        del loss
        engine.step()
        norm = engine.get_global_grad_norm()
        norms += [float(norm)] if norm is not None and number < WARM_UP else []
    if offloads:
        from deepspeed.compile.passes import offload_activation

        said["moves"] = offload_activation.get_offload_activation_stats()
    steady = readings[WARM_UP:]
    times = [reading.forward_ms + reading.backward_ms for reading in steady]
    return {
        "peak_allocated_bytes": max(r.peak_allocated_bytes for r in steady),
        "rest_bytes": rest_bytes,
        "step_ms": statistics.median(times),
        "samples_ms": times,
        "losses": losses,
        "gradient_norms": norms,
    }


def _free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# --- parts ----------------------------------------------------------------------------------------

# What the name of a way begins with.
_WAYS: dict[str, Callable[[Bench, str], Way]] = {
    "save_on_cpu": hooked_way,
    "torchtune": hooked_way,
    "TRL": hooked_way,
    "eager checkpointing": checkpoint_way,
    "eager": eager_way,
    "Inductor": inductor_way,
    "checkpointing": checkpoint_way,
    "memory budget": memory_budget_way,
    "PyTorch's pass": pass_way,
    "offplan hooks": hooks_way,
    "offplan AOT": planned_way,
    "offplan Inductor": planned_way,
    "AOT graphs": aot_way,
}


def way_of(bench: Bench, name: str) -> Way:
    make = next(make for start, make in _WAYS.items() if name.startswith(start))
    return make(bench, name)


def measure_part(spec: str, params: dict[str, str], device: str) -> Iterator[dict[str, Any]]:
    """Everything that the environment asks for, of one model; the first way is the baseline."""
    asked = Asked.read()
    bench = Bench(spec, params, device, asked)
    names = list(asked.budgets)
    if names[0].startswith("DeepCompile"):
        for name in names:
            yield from deepcompile(bench, name)
        return
    failed: dict[str, str] = {}
    ways = []
    for name in names:
        with _reported(Way(name, ""), failed):
            ways.append(way_of(bench, name))
    for found in part(bench, ways):
        yield (
            {"not_measured": {**failed, **found["not_measured"]}}
            if ("not_measured" in found)
            else found
        )
