"""Several plans of one model measured in one process, which builds the model once.

The allocator is emptied between arms, so that peaks do not depend on the arm before.  With the
environment variable ``GPU_LOCK`` naming a file, each of several processes has the machine to itself
for its timed steps (``turns.py``); with ``ALLOCATOR_EVENTS`` naming a folder, the allocator's own
events of one more step of each arm are kept there, to be laid beside a prediction that is off.
"""

from __future__ import annotations

import gc
import gzip
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from turns import Turns

from offplan.budget import Aim, Budget, Outlooks
from offplan.costs import DeviceProfile, op_times_ms, profile_for, with_arithmetic
from offplan.eligibility import DEFAULT_MIN_BYTES, DEFAULT_RULES
from offplan.errors import UsageError
from offplan.fusion import as_run, fused
from offplan.graph import Compiler, save_graph
from offplan.memory import Conditions, Memory
from offplan.plan import Draft, Plan, dump_plan
from offplan.replay.arm import DrawnOn
from offplan.replay.compiled import Replay, build_real, loss_of
from offplan.replay.fingerprint import fingerprints
from offplan.replay.gauge import CpuGauge, CudaGauge
from offplan.replay.optimes import measured_op_times
from offplan.trace.capture import TraceOptions, traced

WARM_UP = 2


class Arms:
    """A model on a device, and the graphs of its step, traced by a first arm without a plan.

    ``deterministic``: with kernels that repeat their bits, where torch has them.
    """

    def __init__(
        self,
        spec: str,
        params: dict[str, str],
        device: str,
        steps: int,
        *,
        deterministic: bool = False,
        compiler: Compiler = "aot_eager",
    ) -> None:
        self.spec, self.params, self.compiler = spec, params, compiler
        self.conditions = Conditions(deterministic=deterministic)
        # Not only with a warning: where that is all, attention's backward does not repeat its bits.
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False
        if deterministic:
            # Its backward never does.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self.steps = steps
        self.turns = Turns(os.environ.get("GPU_LOCK"))
        torch.manual_seed(0)
        start = time.perf_counter()
        with DrawnOn(self.device):
            self.target = build_real(spec, params, self.device)
        self.build_s = time.perf_counter() - start
        self.reference: list[Any] | None = None
        self.repeats = True
        self.unrepeated: list[str] = []
        words = [spec.split(":")[-1].split("/")[-1], *(f"{k}-{v}" for k, v in params.items())]
        self.name, self.arm_count = "-".join(words), 0
        self.op_ms: dict[str, float] = {}
        self.profile: DeviceProfile | None = None
        self.facts: Any = None

    def no_plan(self) -> dict[str, Any]:
        """The arm without a plan; afterwards ``facts`` and measured op times are known."""
        return self.measure(None)

    def draft(self, rules: str = DEFAULT_RULES) -> Draft:
        return Draft(self.facts, rules, DEFAULT_MIN_BYTES)  # type: ignore[arg-type]

    def outlooks(self, draft: Draft, budget: Budget | None = None) -> Outlooks:
        return Outlooks(self.facts, draft.moves, self.aim(budget))

    def aim(self, budget: Budget | None) -> Aim:
        return Aim(
            budget=budget, op_ms=self.op_ms, conditions=self.conditions, profile=self.profile
        )

    def plan(self, budget: Budget | None, rules: str = DEFAULT_RULES) -> Plan:
        draft = self.draft(rules)
        return draft.plan(self.outlooks(draft, budget).outlook(), budget)

    def roofline_ms(self) -> float | None:
        """The step without a plan, from the shipped profile alone."""
        try:
            return sum(op_times_ms(self.facts, profile_for(self.facts.gpu)))
        except UsageError:
            return None

    def measure(self, plan: Plan | None) -> dict[str, Any]:
        """Peaks and times of the arm with ``plan``, beside what was predicted."""
        self.empty()
        with Replay(
            self.target, plan, device=self.device, timing=True, compiler=self.compiler
        ) as replay:
            found = self._steps(replay)
            self._keep_events(replay, plan)
            if self.facts is None:
                self._look_at(replay, found)
        self._reset(0)
        return found if plan is None else self.beside(found, plan)

    def _look_at(self, replay: Replay, found: dict[str, Any]) -> None:
        """Learn what the step is, and how long its ops take, from the arm without a plan."""
        if self.compiler == "aot_eager":
            self.facts = replay.facts
            with self.turns.alone():
                self._reset(0)
                self.op_ms = measured_op_times(replay)
            return
        # What Inductor makes of the graphs, which a replay does not ask for.
        options = TraceOptions(device=self.device.type, compiler=self.compiler)
        self.facts = traced(self.spec, self.params, options).facts
        if self.facts.gpu:
            self.profile = _as_fast(profile_for(self.facts.gpu), self.facts, found["step_ms"])

    def beside(self, found: dict[str, Any], plan: Plan) -> dict[str, Any]:
        """What was measured, with what ``plan`` predicts and how far off that is."""
        ran = as_run(self.facts, plan.transfers)
        around = Memory(ran.facts, self.conditions).reserved_range(ran.transfers)
        predicted = {
            **predicted_of(plan),
            "reserved_range": [around.least_bytes, around.most_bytes],
        }
        found = {**found, "predicted": predicted}
        return {**found, "off": off(found)}

    def _steps(self, replay: Replay) -> dict[str, Any]:
        gauge = CudaGauge(self.device) if self.device.type == "cuda" else CpuGauge()
        gauge.settle(self.target)
        readings, bits = [], []
        for number in range(WARM_UP):
            self._reset(number)
            readings.append(_step(gauge, replay))
            bits.append(self._bits())
        with self.turns.alone():
            for number in range(WARM_UP, WARM_UP + self.steps):
                self._reset(number)
                readings.append(_step(gauge, replay))
        if self.reference is None:
            self.reference = bits
            self._reset(0)
            _step(gauge, replay)
            names = [name for name, _ in self._gradients()]
            again = zip(names, self._bits(), bits[0], strict=True)
            self.unrepeated = [name for name, one, other in again if one != other]
            self.repeats = not self.unrepeated
        # Where kernels do not repeat their bits, only deterministic ones can tell (offplan run).
        same = bits == self.reference if self.repeats else None
        steady = readings[WARM_UP:]
        times = [reading.forward_ms + reading.backward_ms for reading in steady]
        stats = replay.stats()
        return {
            "peak_allocated_bytes": max(r.peak_allocated_bytes for r in steady),
            "peak_reserved_bytes": max(r.peak_reserved_bytes or 0 for r in steady),
            "forward_end_bytes": max(r.forward_end_bytes for r in steady),
            "step_ms": statistics.median(times),
            "forward_ms": statistics.median(r.forward_ms for r in steady),
            "backward_ms": statistics.median(r.backward_ms for r in steady),
            "samples_ms": times,
            "moved_bytes": stats.offloaded_bytes // len(readings),
            "same_bits": same,
        }

    def _keep_events(self, replay: Replay, plan: Plan | None) -> None:
        folder = os.environ.get("ALLOCATOR_EVENTS")
        if folder is None or self.device.type != "cuda":
            return
        self._reset(0)
        torch.cuda.synchronize()
        torch.cuda.memory._record_memory_history(context=None, max_entries=10**6)
        replay.step()
        torch.cuda.synchronize()
        found = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        self.arm_count += 1
        path = Path(folder) / f"{self.name}-{self.arm_count}"
        path.parent.mkdir(parents=True, exist_ok=True)
        events = [
            (event["action"], event.get("addr", 0), event["size"])
            for event in found["device_traces"][0]
        ]
        with gzip.open(f"{path}.json.gz", "wt", compresslevel=3) as output:
            json.dump({"events": events}, output)
        if plan is not None:
            Path(f"{path}.plan.yaml.gz").write_bytes(gzip.compress(dump_plan(plan), 3))
        elif replay.facts is not None:
            graph = gzip.compress(save_graph(replay.facts), 3)
            Path(f"{path}.graph.json.gz").write_bytes(graph)

    def gradients(self, plan: Plan | None) -> dict[str, torch.Tensor]:
        """The gradients of the first step under ``plan``, on the host."""
        self.empty()
        with Replay(self.target, plan, device=self.device, compiler=self.compiler) as replay:
            replay.step()
            found = {name: p.grad.cpu() for name, p in self._gradients() if p.grad is not None}
        self._reset(0)
        return found

    def _bits(self) -> list[Any]:
        found = fingerprints(("gradient", name, p.grad) for name, p in self._gradients())
        return [each.bits for each in found]

    def _gradients(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        named = self.target.model.named_parameters()
        return ((name, p) for name, p in named if p.grad is not None)

    def _reset(self, seed: int) -> None:
        self.target.model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)

    def empty(self) -> None:
        """Give back what an arm before left: gradients, the allocator's blocks, workspaces."""
        self._reset(0)
        gc.collect()
        if self.device.type == "cuda":
            # An arm begins as a process does: without the workspaces of the arms before.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()


def _as_fast(profile: DeviceProfile, facts: Any, step_ms: float) -> DeviceProfile:
    """``profile`` as fast as it takes for the step without a plan to be as long as measured.

    Fused kernels cannot be timed one by one, so the roofline's times are scaled together.
    """
    return with_arithmetic(profile, sum(op_times_ms(fused(facts), profile)) / step_ms)


def _step(gauge: Any, replay: Replay) -> Any:
    with gauge.watching():
        gauge.begin()
        loss = loss_of(replay.forward())
        gauge.forward_ended()
        loss.backward()
        return gauge.ended()


def done_by(plan: Plan) -> str:
    """What a plan does, in short: equal for plans that run the same."""
    does = msgspec.json.encode((plan.digest, plan.choices, plan.transfers))
    return hashlib.sha256(does).hexdigest()[:16]


def predicted_of(plan: Plan) -> dict[str, Any]:
    found, when = plan.predicted.plan, plan.predicted.time
    return {
        "budget_bytes": plan.budget,
        "floor_bytes": plan.predicted.floor_bytes,
        "peak_allocated_bytes": found.peak_bytes,
        "peak_reserved_bytes": found.reserved_bytes,
        "forward_end_bytes": found.forward_end_bytes,
        "step_ms": when.step_ms if when else None,
        "least_step_ms": when.least_ms if when else None,
        "moved_bytes": sum(transfer.transfer_bytes for transfer in plan.transfers),
    }


def off(found: dict[str, Any]) -> dict[str, float]:
    """By what share of the measured value the predicted one is over it."""
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "forward_end_bytes", "step_ms")
    predicted = found["predicted"]
    return {
        name: predicted[name] / found[name] - 1
        for name in names
        if predicted[name] and found.get(name)
    }


def link_speed(device_name: str) -> dict[str, Any]:
    """Bandwidth of pinned copies, each way alone: the best of ten of 2 GB."""
    if device_name == "cpu":
        return {"d2h_bytes_per_s": 10**10, "h2d_bytes_per_s": 10**10}
    size_bytes = 2 * 1000**3
    host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    return {
        "d2h_bytes_per_s": size_bytes / _best_s(lambda: host.copy_(device, non_blocking=True)),
        "h2d_bytes_per_s": size_bytes / _best_s(lambda: device.copy_(host, non_blocking=True)),
    }


def _best_s(copy: Callable[[], Any]) -> float:
    best_ms = float("inf")
    for _ in range(10):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        copy()
        ended.record()
        torch.cuda.synchronize()
        best_ms = min(best_ms, begun.elapsed_time(ended))
    return best_ms / 1000
