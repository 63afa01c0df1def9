"""Host memory: how fast each way to pin is, what it takes, and what eager offload gives with it.

    python benchmarks/pin.py bandwidth      # each backend: rates, cost, real bytes    (1 min)
    python benchmarks/pin.py checkpointed   # 64 checkpointed layers, most of it inputs (3 min)
    python benchmarks/pin.py qwen3          # Qwen3-8B-wide checkpointed layers at 32K  (2 min)
    python benchmarks/pin.py flat           # 500 steps with evaluations between        (1 min)
    python benchmarks/pin.py limits         # under a lock limit, and a memory limit    (1 min)
    python benchmarks/pin.py all            # these in turn, each in a process of its own

1.  A *step* is a forward and a backward.  Gradients are there all the time, and set to zero before
    each step, as in gradient accumulation; an optimizer would only add to every arm.
2.  Arms share a process and its model.  Between them the allocator is emptied; peaks are those of
    each timed step, times those of events on the compute stream.
3.  The first step of each arm is not timed.  It runs deterministic kernels, and its loss and
    gradients are compared with those of the arm without offload, bit for bit; ``repeats`` says
    whether that arm has the same bits when it runs again.
4.  *Real bytes* are what the system says that a process took: locked ones in ``VmLck``, and how
    much its mappings grew, since what CUDA pins itself is not counted as locked.

Each writes ``<gpu>-pin-<what>.json`` into ``benchmarks/results`` (``--out`` names another folder).
Exit code 3 if a target was missed.  ``--device cpu --small`` tries the script out anywhere: it
judges no times there.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Deterministic products, for compared steps; cuBLAS reads it when it starts.  No other size than
# the one that it would take by itself.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import msgspec  # noqa: E402
import torch  # noqa: E402
from machine import Results  # noqa: E402

from offplan.replay import limits as host  # noqa: E402
from offplan.replay.eager import offload_activations  # noqa: E402
from offplan.replay.fingerprint import fingerprints  # noqa: E402
from offplan.replay.gauge import CpuGauge, CudaGauge  # noqa: E402
from offplan.replay.hooks import ActivationOffload  # noqa: E402
from offplan.replay.pinning import Locked, Pageable, Pinning, choose  # noqa: E402
from offplan.replay.probe import (  # noqa: E402
    GIB,
    KIB,
    MIB,
    ClockTimer,
    CudaTimer,
    _ends,
    link_rates,
    pin_costs,
    rates_both_ways,
)
from offplan.replay.runtime import CpuLink, CudaLink  # noqa: E402
from offplan.target import Target  # noqa: E402

# Takes what was measured so far.
Keep = Callable[[dict[str, Any]], None]

BACKENDS = ("register", "torch", "off")
COPY_SIZES = (4 * MIB, 64 * MIB, 256 * MIB, GIB)
# A power of two would not tell a backend that rounds up to one from one that does not.
REAL_BYTES = 129 * MIB + 512 * KIB
LEAST_RATE, LEAST_RATE_BYTES = 0.98, 64 * MIB
LEAST_LOWER = {"checkpointed": 0.58, "qwen3": 0.14}
MOST_OVER = {"checkpointed": 1.05, "qwen3": 1.02}
LEAST_FASTER = 6.4
FLAT_STEPS, FLAT_EVERY = 500, 10
# The interpreter's and the driver's own allocators map and unmap a little; a slab is a mapping.
MOST_MAPS, MOST_GROWTH_BYTES = 4, 16 * MIB
LOCK_LIMIT, MEMORY_LIMIT = 256 * MIB, 2 * GIB


# --- what the system says -------------------------------------------------------------------------


def system_bytes() -> dict[str, int]:
    """Bytes of this process by the name that ``/proc/self/status`` has for them."""
    rows = re.findall(r"(Vm\w+):\s+(\d+) kB", Path("/proc/self/status").read_text())
    return {name: int(number) * KIB for name, number in rows}


def mapped_bytes() -> dict[str, int]:
    """Bytes that are mapped, by what is: a file, a device, or ``anonymous`` memory."""
    found: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        first, end = (int(word, 16) for word in words[0].split("-"))
        name = words[5] if len(words) > 5 else "anonymous"
        found[name] = found.get(name, 0) + end - first
    return found


def map_count() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def real_bytes(pinning: Pinning) -> dict[str, Any]:
    """What pages for ``REAL_BYTES`` take, by what they say and by what the system says."""
    # Whatever the first pages start, a context or an allocator, is not theirs.
    first = pinning.take(1)
    first.give_back()
    del first
    gc.collect()
    before, mapped = system_bytes(), mapped_bytes()
    pages = pinning.take(REAL_BYTES)
    after, grown = system_bytes(), mapped_bytes()
    reserved = pages.reserved_bytes
    pages.give_back()
    del pages
    gc.collect()
    given_back = system_bytes()
    return {
        "asked_bytes": REAL_BYTES,
        "reserved_bytes": reserved,
        "locked_bytes": after["VmLck"] - before["VmLck"],
        "mapped_bytes": sum(grown.values()) - sum(mapped.values()),
        "mapped": {
            name: size - mapped.get(name, 0)
            for name, size in grown.items()
            if size != mapped.get(name, 0)
        },
        "resident_bytes": after["VmRSS"] - before["VmRSS"],
        "still_locked_bytes": given_back["VmLck"] - before["VmLck"],
    }


# --- bandwidth ------------------------------------------------------------------------------------


def measure_bandwidth(options: argparse.Namespace, keep: Keep) -> dict[str, Any]:
    backends: dict[str, dict[str, Any]] = {}
    for name in BACKENDS:
        for found in _child(name, options):
            backends[name] = found
            keep(_judged(backends, options))
        print(f"{name}: {json.dumps(backends[name])}")
    return _judged(backends, options)


def _judged(backends: dict[str, dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    finished = [name for name in BACKENDS if backends.get(name, {}).get("exit_code") == 0]
    met = {"every backend ran": len(finished) == len(BACKENDS)}
    real = {name: backends[name]["real"] for name in finished}
    if "register" in real:
        one = real["register"]
        over_bytes = one["reserved_bytes"] - one["asked_bytes"]
        met["register reserves what was asked for, in whole pages"] = (
            0 <= over_bytes < host.PAGE_BYTES
        )
        met["register: VmLck grows by what is reserved"] = (
            one["locked_bytes"] == one["reserved_bytes"]
        )
        met["register: nothing stays locked"] = one["still_locked_bytes"] == 0
    if "off" in real:
        met["off locks nothing"] = real["off"]["locked_bytes"] == 0
    ratios: dict[str, Any] = {}
    if options.device == "cuda":
        if "torch" in real:
            # CUDA maps it as shared zero pages, inside a range that it had set aside.
            grown = real["torch"]["mapped"].get("/dev/zero (deleted)", 0)
            off = grown / real["torch"]["reserved_bytes"] - 1
            met["torch: shared mappings grow by what is reserved, within 1%"] = abs(off) <= 0.01
        if {"register", "torch"} <= set(finished):
            ratios = _ratios(backends["register"], backends["torch"])
            met["register within 2% of torch, each way from 64 MiB"] = all(
                ratio >= LEAST_RATE for size, ratio in ratios.items() if size >= LEAST_RATE_BYTES
            )
    return {
        "ok": all(met.values()),
        "met": met,
        "register_over_torch": {str(size): ratio for size, ratio in ratios.items()},
        "backends": backends,
    }


def _ratios(one: dict[str, Any], other: dict[str, Any]) -> dict[int, float]:
    """By copy size: the lower of the two ratios of the rates each way alone."""
    pairs = zip(one["alone"], other["alone"], strict=True)
    return {
        mine["size_bytes"]: min(
            mine[way] / theirs[way] for way in ("d2h_bytes_per_s", "h2d_bytes_per_s")
        )
        for mine, theirs in pairs
    }


def bandwidth_child(name: str, device_name: str, *, small: bool) -> Iterator[dict[str, Any]]:
    on_gpu = device_name == "cuda"
    if on_gpu:
        device = torch.device("cuda", 0)
        pinning = choose(name, device)  # type: ignore[arg-type]
        link, timer = CudaLink(device), CudaTimer(device)
    else:
        # Where no device knows them, pages can only be locked, or not.
        pinning = Locked() if name == "register" else Pageable()
        link, timer = CpuLink(), ClockTimer()
    yield {"real": real_bytes(pinning)}
    sizes = COPY_SIZES[:2] if small else COPY_SIZES
    costs = {}
    for size in sizes[-1:] if small else (GIB, 4 * GIB):
        costs[size] = pin_costs(pinning, [size]).s_per_byte * 1e9
    yield {"pin_s_per_gb": costs}
    with _ends(link, pinning, 2 * sizes[-1]) as ends:
        # Pages that were never written to are all the same one, which is in the cache.
        for end in ends.host:
            end.fill_(3)
        rates = link_rates(link, timer, ends, sizes)
        yield {"alone": msgspec.to_builtins(rates)}
        # Pageable copies take turns, at a small part of the rate.
        count, runs = (1, 1) if name == "off" else (4, 5)
        both = []
        for size in sizes:
            many = max(count, min(32, 256 * MIB // size))
            d2h, h2d = rates_both_ways(link, timer, ends, size, many, runs)
            both.append({"size_bytes": size, "d2h_bytes_per_s": d2h, "h2d_bytes_per_s": h2d})
        yield {"both": both}


def _child(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What a process of its own has measured so far, each time that it says something more."""
    words = [sys.executable, __file__, "child", name, "--device", options.device]
    words += ["--small"] if options.small else []
    found: dict[str, Any] = {}
    start = time.perf_counter()
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.PIPE, stderr=said, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            found |= json.loads(line) | {"wall_s": round(time.perf_counter() - start, 1)}
            yield dict(found)
        found["exit_code"] = process.wait()
        said.seek(0)
        found["said"] = said.read()[-3000:] if found["exit_code"] else ""
    yield found


# --- checkpointed models --------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A decoder stack without a head, of checkpointed layers, and the tokens that it is given."""

    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    batch: int
    seq: int

    @property
    def input_bytes(self) -> int:
        """Of one layer's input."""
        return self.batch * self.seq * self.hidden * 2


SHAPES = {
    "checkpointed": Shape("llama", 1024, 1024, 64, 16, 16, 64, 1024, 64, 2048),
    "qwen3": Shape("qwen3", 4096, 12288, 36, 32, 8, 128, 1024, 1, 32768),
    "flat": Shape("llama", 512, 1024, 6, 8, 8, 64, 1024, 8, 1024),
}


class Steps:
    """A model of ``shape`` on the device, and its steps."""

    def __init__(self, shape: Shape, device_name: str) -> None:
        on_gpu = device_name == "cuda"
        self.device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        torch.manual_seed(0)
        # Drawn where it is used: a CPU takes minutes for some billion numbers.
        with self.device:
            self.model = _model(shape)
            self.tokens = torch.randint(shape.vocabulary, (shape.batch, shape.seq))
        self.gauge: Any = CudaGauge(self.device) if on_gpu else CpuGauge()
        self.gauge.settle(Target(self.model, (), {"input_ids": self.tokens}))
        self.is_strict = True

    def step(self, active: AbstractContextManager[Any]) -> tuple[Any, torch.Tensor]:
        """What the gauge read of a step whose forward is in ``active``; and the loss."""
        self.model.zero_grad(set_to_none=False)
        torch.manual_seed(1)
        with self.gauge.watching():
            self.gauge.begin()
            with active:
                output = self.model(input_ids=self.tokens).last_hidden_state
            # In few bytes: it comes when every input is there, and must not set the peak.
            loss = torch.mean(output.square(), dtype=torch.float32)
            del output
            self.gauge.forward_ended()
            loss.backward()
            return self.gauge.ended(), loss.detach()

    def compared(self, active: Callable[[], AbstractContextManager[Any]]) -> list[str]:
        """Bits of the loss and of every gradient of a step by deterministic kernels."""
        torch.use_deterministic_algorithms(True, warn_only=not self.is_strict)
        torch.utils.deterministic.fill_uninitialized_memory = False
        try:
            _, loss = self.step(active())
        except RuntimeError as error:
            if not self.is_strict or "deterministic" not in str(error):
                raise
            print(f"not every kernel is deterministic: {error}", file=sys.stderr)
            self.is_strict = False
            return self.compared(active)
        finally:
            torch.use_deterministic_algorithms(False)
        named = [("loss", "", loss)]
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                named.append(("gradient", name, parameter.grad))
        return [each.bits for each in fingerprints(named)]

    def empty(self) -> None:
        """Leave nothing of an arm in the allocators, on the device and on the host."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            torch._C._host_emptyCache()


def _model(shape: Shape) -> torch.nn.Module:
    import transformers

    family = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[shape.family]
    config = family(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.seq,
        use_cache=False,
    )
    model = transformers.AutoModel.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


@dataclass(frozen=True)
class Arm:
    """What is entered around each forward, and how many steps are timed."""

    active: Callable[[], AbstractContextManager[Any]]
    step_count: int
    offload: ActivationOffload | None = None


def measure_model(what: str, options: argparse.Namespace, keep: Keep) -> dict[str, Any]:
    """No offload, offload of the layers' inputs, and torch's own blocking ones."""
    shape = _shape(what, options)
    start = time.perf_counter()
    steps = Steps(shape, options.device)
    parameters = sum(parameter.numel() for parameter in steps.model.parameters())
    result: dict[str, Any] = {
        "shape": asdict(shape),
        "layer_input_bytes": shape.input_bytes,
        "parameters": parameters,
        "gradients": "allocated before the step, set to zero",
        "build_s": round(time.perf_counter() - start, 1),
        "arms": {},
    }
    names = ["no offload", "offload", "save_on_cpu, pinned"]
    names += ["save_on_cpu, pageable"] if what == "checkpointed" else []
    reference: list[str] = []
    for name in names:
        arm = _arm(name, steps, options, is_short=what == "qwen3")
        start = time.perf_counter()
        bits = steps.compared(arm.active)
        if not reference:
            reference = bits
            result["repeats"] = steps.compared(arm.active) == bits
        found = _timed(steps, arm) | {
            "same_bits": bits == reference,
            "same_loss": bits[0] == reference[0],
            "wall_s": round(time.perf_counter() - start, 1),
        }
        if arm.offload is not None:
            arm.offload.close()
        del arm
        steps.empty()
        result["arms"][name] = found
        print(f"{name}: {json.dumps(found)}")
        keep(_compared(what, result, names, options))
    return _compared(what, result, names, options)


def _arm(name: str, steps: Steps, options: argparse.Namespace, *, is_short: bool) -> Arm:
    if name == "no offload":
        return Arm(nullcontext, 3)
    if name == "offload":
        offload = _offload(steps, options, timing=True)
        return Arm(lambda: offload, 3, offload)
    pinned = name == "save_on_cpu, pinned"
    count = 2 if pinned and not is_short else 1
    return Arm(lambda: torch.autograd.graph.save_on_cpu(pin_memory=pinned), count)


def _offload(steps: Steps, options: argparse.Namespace, *, timing: bool) -> ActivationOffload:
    more = {"min_offload_bytes": 4 * KIB} if options.small else {}
    return offload_activations(
        parameters=steps.model,
        device=steps.device,
        checkpointed_inputs_only=True,
        timing=timing,
        **more,
    )


def _timed(steps: Steps, arm: Arm) -> dict[str, Any]:
    """Peaks and times of the arm's steps; and per step what its offload did."""
    if steps.device.type == "cuda":
        # Other kernels ran so far, and what they left would count as reserved.
        torch.cuda.empty_cache()
    before = None if arm.offload is None else arm.offload.stats()
    readings = [steps.step(arm.active())[0] for _ in range(arm.step_count)]
    times = [reading.forward_ms + reading.backward_ms for reading in readings]
    found = {
        "peak_allocated_bytes": max(r.peak_allocated_bytes for r in readings),
        "peak_reserved_bytes": max(r.peak_reserved_bytes or 0 for r in readings) or None,
        "forward_end_bytes": max(r.forward_end_bytes for r in readings),
        "step_ms": statistics.median(times),
        "forward_ms": statistics.median(r.forward_ms for r in readings),
        "backward_ms": statistics.median(r.backward_ms for r in readings),
        "samples_ms": times,
        "locked_bytes": system_bytes()["VmLck"],
    }
    if arm.offload is None or before is None:
        return found
    after, count = arm.offload.stats(), arm.step_count
    stalled = None
    if after.stalled_ms is not None and before.stalled_ms is not None:
        stalled = (after.stalled_ms - before.stalled_ms) / count
    return found | {
        "to_host_bytes": (after.moved.bytes - before.moved.bytes) // count,
        "to_device_bytes": (after.reloaded.bytes - before.reloaded.bytes) // count,
        "moved_count": (after.moved.count - before.moved.count) // count,
        "kept_count": (after.kept.count - before.kept.count) // count,
        "stalled_ms": stalled,
        "host_pinned_bytes": after.host_pinned_bytes,
    }


def _compared(
    what: str, result: dict[str, Any], names: Sequence[str], options: argparse.Namespace
) -> dict[str, Any]:
    """What was measured so far, beside the targets."""
    arms = result["arms"]
    met = {"every arm ran": list(arms) == list(names)}
    if result["repeats"]:
        met["bits are the same"] = all(arm["same_bits"] for arm in arms.values())
    else:
        met["losses are the same"] = all(arm["same_loss"] for arm in arms.values())
    ratios: dict[str, float] = {}
    if "offload" in arms:
        none, offload = arms["no offload"], arms["offload"]
        met["what moves comes back"] = 0 < offload["to_host_bytes"] == offload["to_device_bytes"]
        ratios["lower_peak"] = 1 - offload["peak_allocated_bytes"] / none["peak_allocated_bytes"]
        ratios["over_step"] = offload["step_ms"] / none["step_ms"]
        for name in names[2:]:
            if name in arms:
                ratios[f"faster than {name}"] = arms[name]["step_ms"] / offload["step_ms"]
        if options.device == "cuda" and not options.small:
            met |= _targets(what, ratios)
    return {"ok": all(met.values()), "met": met, "ratios": ratios, **result}


def _targets(what: str, ratios: dict[str, float]) -> dict[str, bool]:
    lower, over = LEAST_LOWER[what], MOST_OVER[what]
    met = {
        f"peak at least {lower:.0%} lower": ratios["lower_peak"] >= lower,
        f"step at most {over:.2f} times": ratios["over_step"] <= over,
    }
    faster = ratios.get("faster than save_on_cpu, pageable")
    if faster is not None:
        met[f"at least {LEAST_FASTER} times faster than blocking"] = faster >= LEAST_FASTER
    return met


def _shape(what: str, options: argparse.Namespace) -> Shape:
    shape = SHAPES[what]
    if options.small:
        shape = replace(shape, hidden=128, intermediate=256, heads=4, kv_heads=2, head_dim=32)
        shape = replace(shape, layers=4, vocabulary=256, batch=2, seq=128)
    given = dict(text.split("=", 1) for text in options.shape.split(",") if text)
    return replace(shape, **{name: int(number) for name, number in given.items()})


# --- flat -----------------------------------------------------------------------------------------


def measure_flat(options: argparse.Namespace, keep: Keep) -> dict[str, Any]:
    """Training with an evaluation after each tenth step: what is held at the end of each step."""
    shape = _shape("flat", options)
    steps = Steps(shape, options.device)
    count = 40 if options.small else FLAT_STEPS
    optimizer = torch.optim.SGD(steps.model.parameters(), lr=1e-3)
    offload = _offload(steps, options, timing=False)
    rows: list[dict[str, int]] = []
    evaluated_bytes = 0
    for number in range(1, count + 1):
        steps.step(offload)
        optimizer.step()
        if number % FLAT_EVERY == 0:
            before = offload.stats().moved.bytes
            _evaluate(steps, offload)
            evaluated_bytes += offload.stats().moved.bytes - before
        rows.append(_held(steps, offload))
        if number % 100 == 0:
            keep(_flat(rows, shape, offload, evaluated_bytes))
    result = _flat(rows, shape, offload, evaluated_bytes)
    offload.close()
    result["closed"] = {
        "locked_bytes": system_bytes()["VmLck"],
        "host_pinned_bytes": offload.stats().host_pinned_bytes,
    }
    result["met"]["nothing is pinned once closed"] = not any(result["closed"].values())
    result["met"]["every step ran"] = len(rows) == count
    result["ok"] = all(result["met"].values())
    print(json.dumps(result["held"]))
    return result


def _evaluate(steps: Steps, offload: ActivationOffload) -> None:
    steps.model.eval()
    with torch.no_grad(), offload:
        steps.model(input_ids=steps.tokens)
    steps.model.train()


def _held(steps: Steps, offload: ActivationOffload) -> dict[str, int]:
    on_gpu, system = steps.device.type == "cuda", system_bytes()
    return {
        "device_bytes": steps.gauge.held_bytes(),
        "device_reserved_bytes": torch.cuda.memory_reserved() if on_gpu else 0,
        "host_pinned_bytes": offload.stats().host_pinned_bytes,
        "locked_bytes": system["VmLck"],
        "resident_bytes": system["VmRSS"],
        "map_count": map_count(),
    }


def _flat(
    rows: Sequence[dict[str, int]], shape: Shape, offload: ActivationOffload, evaluated_bytes: int
) -> dict[str, Any]:
    """The least and the most of what was held after the tenth step."""
    rest = rows[FLAT_EVERY:]
    held = {
        name: {"min": min(row[name] for row in rest), "max": max(row[name] for row in rest)}
        for name in rest[0]
    }
    part = max(1, len(rest) // 10)
    first, last = ([row["resident_bytes"] for row in rest[cut]] for cut in _ends_of(part))
    grown_bytes = round(statistics.mean(last) - statistics.mean(first))
    equal = ("device_bytes", "device_reserved_bytes", "host_pinned_bytes", "locked_bytes")
    met = {f"{name} are equal": held[name]["min"] == held[name]["max"] for name in equal}
    spread = held["map_count"]["max"] - held["map_count"]["min"]
    met[f"mappings differ by at most {MOST_MAPS}"] = spread <= MOST_MAPS
    met["resident bytes grow by less than 16 MiB"] = grown_bytes < MOST_GROWTH_BYTES
    met["evaluation moves nothing"] = evaluated_bytes == 0
    met["training moves"] = offload.stats().moved.bytes > 0
    return {
        "ok": all(met.values()),
        "met": met,
        "shape": asdict(shape),
        "steps": len(rows),
        "held": held,
        "resident_grown_bytes": grown_bytes,
        "every_50th": rows[49::50],
    }


def _ends_of(count: int) -> tuple[slice, slice]:
    return slice(None, count), slice(-count, None)


# --- limits ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limited:
    """How a command is put under a limit: the words before it; or why that is not done here.

    ``limit_bytes`` may be another than the one wanted, and ``is_enforced`` says whether the system
    keeps to it, or only says so.
    """

    words: tuple[str, ...] = ()
    limit_bytes: int | None = None
    is_enforced: bool = True
    how: str = ""
    skipped: str = ""


def measure_limits(options: argparse.Namespace, keep: Keep) -> dict[str, Any]:
    spec, params = "benchmarks/models.py:llama", {"layers": "2"}
    if options.small:
        spec, params = "sample_graphs/tiny_gpt.py", {"layers": "1"}
    given = [word for name, value in params.items() for word in ("-p", f"{name}={value}")]
    run = ["run", spec, *given, "--budget", "0", "--device", options.device, "--steps", "1"]
    run += ["--no-verify", "--format", "json"]
    cases: dict[str, dict[str, Any]] = {}
    with _memory_limited(options) as memory:
        ways = {
            "no limit": Limited(how="as the benchmark itself"),
            "lock limit": _lock_limited(LOCK_LIMIT),
            # Where nothing is pinned, nothing is locked.
            "no locking at all": _lock_limited(0)
            if options.device == "cuda"
            else Limited(skipped="on a CPU nothing is locked, so that nothing is refused"),
            "memory limit": memory,
        }

        def measure(name: str) -> None:
            cases[name] = _under(ways[name], run)
            keep(_kept_to(dict(cases), ways, options, [spec, *given]))

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(measure, ways))
    for name, case in cases.items():
        print(f"{name}: {json.dumps({k: v for k, v in case.items() if k != 'device'})}")
    return _kept_to(cases, ways, options, [spec, *given])


def _under(limited: Limited, run: Sequence[str]) -> dict[str, Any]:
    """What the two commands say and give under a limit."""
    if limited.skipped:
        return {"skipped": limited.skipped}
    code, output, said = _offplan(limited, [*run])
    report = json.loads(output) if output else {}
    arms = {arm["role"]: arm for arm in report.get("arms", ())}
    steps = arms.get("plan", {}).get("steps", ())
    words = ("device", "--host", "--max-pin", "1GiB", "--format", "json")
    device = _offplan(limited, words)
    return {
        "how": limited.how,
        "limit_bytes": limited.limit_bytes,
        "is_enforced": limited.is_enforced,
        "exit_code": code,
        "message": said,
        "notes": report.get("notes", []),
        "outcomes": {role: arm["outcome"] for role, arm in arms.items()},
        "host_bytes": max((step["host_bytes"] for step in steps), default=None),
        "moved_bytes": max((step["to_host_bytes"] for step in steps), default=None),
        "peak_allocated_bytes": max((step["peak_allocated_bytes"] for step in steps), default=None),
        "device": {
            "exit_code": device[0],
            "message": device[2],
            "report": json.loads(device[1]) if device[1] else None,
        },
    }


_GROUP_PATH = re.compile(r'/sys/fs/cgroup/[^\s")]*?(/memory[.\w]*)?(?=[\s")])')


def _offplan(limited: Limited, words: Sequence[str]) -> tuple[int, str, str]:
    command = [*limited.words, sys.executable, "-m", "offplan", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    # Which group it was is the machine's own affair.
    output, said = (_GROUP_PATH.sub(r"/sys/fs/cgroup/...\1", s) for s in (done.stdout, done.stderr))
    return done.returncode, output, said.strip()


def _kept_to(
    cases: dict[str, dict[str, Any]],
    ways: dict[str, Limited],
    options: argparse.Namespace,
    target: Sequence[str],
) -> dict[str, Any]:
    ran = {name: case for name, case in cases.items() if "skipped" not in case}
    met = {"every case ran, or says why not": cases.keys() == ways.keys()}
    said = [json.dumps(case) for case in ran.values()]
    met["nobody says CUDA out of memory"] = not any("CUDA out of memory" in text for text in said)
    met["offplan device names the limits"] = all(
        case["device"]["exit_code"] == 0 and _names(case["device"], _LIMITS[name])
        for name, case in ran.items()
        if name in _LIMITS
    )
    free = ran.get("no limit", {}).get("host_bytes")
    on_gpu = options.device == "cuda"
    for name, wanted in (("lock limit", LOCK_LIMIT), ("memory limit", MEMORY_LIMIT)):
        if name in ran and (on_gpu or name == "memory limit"):
            met |= _within(name, wanted, ran[name], free, on_gpu=on_gpu)
    refused = ran.get("no locking at all")
    if on_gpu and refused is not None:
        met["no locking at all: refused clearly"] = (
            refused["exit_code"] == 1 and "host pinned memory" in refused["message"]
        )
    return {"ok": all(met.values()), "met": met, "target": list(target), "cases": cases}


_LIMITS = {"lock limit": "ulimit -l", "memory limit": "cgroup"}


def _within(
    name: str, wanted_bytes: int, case: dict[str, Any], free_bytes: int | None, *, on_gpu: bool
) -> dict[str, bool]:
    notes = " ".join(case["notes"])
    words = "host pinned memory" if on_gpu else "host memory"
    host_bytes, limit_bytes = case["host_bytes"], case["limit_bytes"]
    label = name if case["is_enforced"] else f"{name} (said, not enforced)"
    return {
        f"{label}: is {wanted_bytes // MIB} MiB": limit_bytes == wanted_bytes,
        f"{label}: completes": case["exit_code"] == 0,
        f"{label}: a note names it": _LIMITS[name] in notes,
        f"{label}: the note says {words}": words in notes,
        f"{label}: host bytes are within it": host_bytes is not None and host_bytes <= limit_bytes,
        f"{label}: and fewer than without it": None not in (host_bytes, free_bytes)
        and host_bytes < free_bytes,
    }


def _names(device: dict[str, Any], limit: str) -> bool:
    return limit in json.dumps(device["report"])


def _lock_limited(limit_bytes: int) -> Limited:
    """A limit on locked memory, for a process that may not go over it.

    One that is lower, where this process is under such a one and cannot raise it.
    """
    tools = ["prlimit", *(["setpriv"] if os.geteuid() == 0 else [])]
    for tool in tools:
        if shutil.which(tool) is None:
            return Limited(skipped=f"there is no {tool} here, which sets the limit")
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    refusal = ""
    for number in (limit_bytes, hard):
        words = ["prlimit", f"--memlock={number}:{number}"]
        if os.geteuid() == 0:
            words += ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"]
        tried = subprocess.run([*words, "true"], capture_output=True, text=True, check=False)
        if not tried.returncode:
            how = " ".join(filter(None, (*words, refusal)))
            return Limited(tuple(words), number, how=how)
        refusal = f"({limit_bytes}: {tried.stderr.strip()})"
    return Limited(skipped=refusal)


@contextmanager
def _memory_limited(options: argparse.Namespace) -> Iterator[Limited]:
    """A limit on memory: by a control group below this process's own, or by files that say so."""
    refusals = []
    for name, way in (("group", _in_a_group), ("files", _with_files)):
        if options.memory_limit not in (name, "any"):
            continue
        with way(options) as limited:
            if not limited.skipped:
                yield limited
                return
            refusals.append(f"{name}: {limited.skipped}")
    yield Limited(skipped="; ".join(refusals))


def _own_groups() -> Iterator[tuple[int, Path]]:
    """The folder of this process's control group, by version of the hierarchy."""
    proc, root = Path("/proc/self"), Path("/")
    groups = dict(host._groups(proc / "cgroup"))
    for mount in host._mounts(proc / "mountinfo"):
        if mount.version in groups:
            yield mount.version, Path(next(host._upwards(root, mount, groups[mount.version])))


@contextmanager
def _in_a_group(options: argparse.Namespace) -> Iterator[Limited]:
    """A group below this process's own, so that every limit above holds as well."""
    why = "no control group that limits memory is mounted here"
    for version, own in _own_groups():
        folder = own / f"offplan-pin-{os.getpid()}"
        limit = folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")
        try:
            folder.mkdir()
        except OSError as error:
            why = f"{folder} cannot be made: {error.strerror}"
            continue
        try:
            why = _limit(limit)
            if not why:
                enter = f'echo $$ > {folder}/cgroup.procs && exec "$@"'
                words = ("sh", "-c", enter, "sh")
                yield Limited(words, MEMORY_LIMIT, how=f"{limit} is {MEMORY_LIMIT}")
                return
        finally:
            _remove(folder)
    yield Limited(skipped=why)


def _limit(path: Path) -> str:
    """Why the limit of a new group cannot be set; empty once it is."""
    if not path.exists():
        return f"groups below {path.parent.parent} do not limit memory"
    try:
        path.write_text(str(MEMORY_LIMIT))
    except OSError as error:
        return f"{path} cannot be set: {error.strerror}"
    return ""


def _remove(folder: Path) -> None:
    """Remove a group; what it held has ended, but it may take the system a moment to see that."""
    for _ in range(50):
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)


@contextmanager
def _with_files(options: argparse.Namespace) -> Iterator[Limited]:
    """Other files in place of the group's, seen by the command alone: read, but not enforced."""
    own = next(_own_groups(), None)
    if own is None or shutil.which("unshare") is None:
        yield Limited(skipped="no control group that limits memory, or no unshare")
        return
    # Under the small limit the small target has no room; a process takes some of the other.
    used = MEMORY_LIMIT - 160 * MIB if options.small else 256 * MIB
    with tempfile.TemporaryDirectory() as name:
        files = ("memory.max", "memory.current", "memory.limit_in_bytes", "memory.usage_in_bytes")
        for file, number in zip(files, (MEMORY_LIMIT, used) * 2, strict=True):
            (Path(name) / file).write_text(str(number))
        inner = f'mount --bind {name} {own[1]} && exec "$@"'
        words = ("unshare", "--mount", "sh", "-c", inner, "sh")
        tried = subprocess.run([*words, "true"], capture_output=True, text=True, check=False)
        if tried.returncode:
            yield Limited(skipped=f"a mount of its own: {tried.stderr.strip()}")
            return
        how = f"files over {own[1]} that say {used} of {MEMORY_LIMIT}: not enforced"
        yield Limited(words, MEMORY_LIMIT, is_enforced=False, how=how)


# --- the command ----------------------------------------------------------------------------------


BENCHMARKS: dict[str, Callable[[argparse.Namespace, Keep], dict[str, Any]]] = {
    "bandwidth": measure_bandwidth,
    "checkpointed": lambda options, keep: measure_model("checkpointed", options, keep),
    "qwen3": lambda options, keep: measure_model("qwen3", options, keep),
    "flat": measure_flat,
    "limits": measure_limits,
}


def measure_all(options: argparse.Namespace) -> None:
    codes = []
    for name in BENCHMARKS:
        words = [sys.executable, __file__, name, "--out", str(options.out)]
        words += ["--device", options.device, *(["--small"] if options.small else [])]
        words += ["--memory-limit", options.memory_limit] if name == "limits" else []
        codes.append(subprocess.run(words, check=False).returncode)
    raise SystemExit(max(codes))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name in (*BENCHMARKS, "all", "child"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
        command.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
        command.add_argument("--small", action="store_true", help="tiny sizes, to try it out")
        command.set_defaults(shape="")
        if name in SHAPES:
            command.add_argument("--shape", help="other sizes: layers=96,seq=1024")
        if name == "limits":
            command.add_argument("--jobs", type=int, default=4)
        if name in ("limits", "all"):
            command.add_argument(
                "--memory-limit",
                choices=("any", "group", "files"),
                default="any",
                help="a control group below this process's own, or files that only say so",
            )
        if name == "child":
            command.add_argument("pin", choices=BACKENDS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.benchmark == "all":
        measure_all(options)
    if options.benchmark == "child":
        for found in bandwidth_child(options.pin, options.device, small=options.small):
            print(json.dumps(found), flush=True)
        return
    results = Results("pin", options.benchmark, options.device, options.out)
    results.close(BENCHMARKS[options.benchmark](options, results.keep))


if __name__ == "__main__":
    main()
