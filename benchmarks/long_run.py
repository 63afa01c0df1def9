"""Thousands of steps: does memory stay flat, and does a step take as long at the end?

    python benchmarks/long_run.py                  # 2,000 steps each way on one GPU      (2 min)
    python benchmarks/long_run.py --device cpu     # the same, of a smaller model         (10 min)

Trains a small model through ``offplan.backend`` (a plan for each shape, everything movable moved),
and then eagerly under ``offplan.offload_activations``.  Shapes alternate, gradients accumulate over
two micro-batches in every fourth step, and there are evaluations.  Of every 20 steps one fails in
the forward, one in the backward, one drops its loss, and in one a copy fails, out or back.

Every 50 steps: resident bytes, bytes allocated and reserved on the device, pinned bytes, tensors,
objects, threads and open files, and the median step.  A line is fitted to each from the second
quarter on.  Exit code 3 if one grew, or if the last quarter's median step is over 1.10 of the
second's; on a CPU the step is what the process computed, since others share the machine.  Writes
``<gpu>-long-run.json`` into ``benchmarks/results`` (``--out`` names another folder).
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import Results
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import offplan  # noqa: E402
from offplan.replay.runtime import Link, ReplayError  # noqa: E402

STEPS, WINDOW = 2000, 50
SLOWER, GROWN_BYTES, GROWN_COUNT = 1.10, 8 * 2**20, 20
_SIZES = {"cuda": (1024, (512, 1024, 768)), "cpu": (32, (64, 128, 96))}


# --- what is trained ------------------------------------------------------------------------------


class MayFail(torch.autograd.Function):
    """Fails where it is told to, as an op of a user's own may."""

    place = ""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.offplan_long_run.may_fail(x, "forward")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.ops.offplan_long_run.may_fail(gradient, "backward")


@torch.library.custom_op("offplan_long_run::may_fail", mutates_args=())
def _may_fail(x: torch.Tensor, place: str) -> torch.Tensor:
    if MayFail.place == place:
        raise ValueError(f"failed in the {place}")
    return x.clone()


_may_fail.register_fake(lambda x, place: torch.empty_like(x))


class Net(nn.Module):
    def __init__(self, width: int, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x + F.gelu(layer(self.norm(x)))
            if number == 1:
                x = MayFail.apply(x)
        return x.square().mean()


class Refused(RuntimeError):
    """What a copy ends in that is made to fail."""


class Loop:
    """Training steps by number.  ``call`` runs the model; ``link`` is what its copies go over."""

    def __init__(
        self,
        model: nn.Module,
        call: Callable[[torch.Tensor], torch.Tensor],
        device: str,
        link: Link | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model, self.call, self.link, self.around = model, call, link, around
        self.device = device
        self.width, self.rows = _SIZES[device]
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(self, number: int) -> str:
        """What kind of step it was; ``plain`` ones are timed."""
        place = number % 20
        if place == 5:
            return self._evaluate(number)
        if place == 7:
            return self._fail(number, "forward")
        if place == 11:
            return self._fail(number, "backward")
        if place == 13:
            with self.around():
                self.call(self._batch(number))
            return "dropped"
        if place == 17:
            return self._refuse(number, "fetch" if number % 40 == 37 else "send")
        return self._train(number)

    def _train(self, number: int) -> str:
        count = 2 if number % 4 == 0 else 1
        for part in range(count):
            with self.around():
                loss = self.call(self._batch(number + part))
            (loss / count).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return "plain" if count == 1 else "accumulated"

    def _evaluate(self, number: int) -> str:
        with torch.no_grad():
            self.call(self._batch(0))
        return "evaluated"

    def _fail(self, number: int, place: str) -> str:
        MayFail.place = place
        try:
            self._train(number)
        except ValueError:
            self.optimizer.zero_grad()
            return f"failed in the {place}"
        finally:
            MayFail.place = ""
        raise AssertionError(f"nothing failed in the {place}")

    def _refuse(self, number: int, name: str) -> str:
        """Have the first copy out or back fail.  Without a link there is none."""
        if self.link is None:
            return "refused"
        before = getattr(self.link, name)

        def refused(*_: Any) -> None:
            raise Refused("CUDA error: refused")

        setattr(self.link, name, refused)
        try:
            self._train(number)
        except ReplayError as error:
            if not isinstance(error.__cause__, Refused):
                raise
            self.optimizer.zero_grad()
            return "refused"
        finally:
            setattr(self.link, name, before)
        raise AssertionError(f"no copy was refused by {name}")

    def _batch(self, number: int) -> torch.Tensor:
        rows = self.rows[number % len(self.rows)]
        drawn = torch.Generator().manual_seed(number)
        return torch.randn(rows, self.width, generator=drawn).to(self.device)


class Training(NamedTuple):
    loop: Loop
    pinned_bytes: Callable[[], int]


@contextmanager
def compiled(device: str) -> Iterator[Training]:
    """Through ``torch.compile``."""
    compiler = "inductor" if device == "cuda" else "aot_eager"
    with offplan.backend(budget="floor", min_size=1, device=device, compiler=compiler) as backend:
        model = _model(device)
        call = torch.compile(model, backend=backend, dynamic=False)
        loop = Loop(model, call, device, backend.runtime.link)
        yield Training(loop, lambda: backend.stats().host_pinned_bytes)


@contextmanager
def hooks(device: str) -> Iterator[Training]:
    """Eagerly."""
    model = _model(device)
    offload = offplan.offload_activations(parameters=model, device=device, min_offload_bytes=1)
    try:
        loop = Loop(model, model, device, offload.mover.link, lambda: offload)
        yield Training(loop, lambda: offload.stats().host_pinned_bytes)
    finally:
        offload.close()


def plain(device: str) -> Loop:
    """Eagerly, with nothing moved."""
    model = _model(device)
    return Loop(model, model, device)


def _model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return Net(_SIZES[device][0]).to(device)


ENGINES = {"compiled": compiled, "hooks": hooks}


# --- what is recorded -----------------------------------------------------------------------------


def held(device: str, pinned_bytes: int) -> dict[str, int]:
    """What the process holds now, once what nobody refers to has gone."""
    gc.collect()
    pages = Path("/proc/self/statm").read_text().split()[1]
    objects = gc.get_objects()
    found = {
        "resident_bytes": int(pages) * os.sysconf("SC_PAGE_SIZE"),
        "pinned_bytes": pinned_bytes,
        "tensors": sum(1 for each in objects if type(each) is torch.Tensor),
        "objects": len(objects),
        "threads": threading.active_count(),
        "open_files": len(os.listdir("/proc/self/fd")),
    }
    if device == "cuda":
        torch.cuda.synchronize()
        found["allocated_bytes"] = torch.cuda.memory_allocated()
        found["reserved_bytes"] = torch.cuda.memory_reserved()
    return found


def measure(engine: str, device: str, steps: int) -> dict[str, Any]:
    clock = time.process_time if device == "cpu" else time.perf_counter
    windows: list[dict[str, Any]] = []
    kinds: Counter[str] = Counter()
    start = time.perf_counter()
    with ENGINES[engine](device) as training:
        times: list[float] = []
        for number in range(steps):
            begun = clock()
            kind = training.loop.step(number)
            if device == "cuda":
                torch.cuda.synchronize()
            kinds[kind] += 1
            if kind == "plain":
                times.append(1000 * (clock() - begun))
            if (number + 1) % WINDOW == 0:
                found = {"step": number + 1, "step_ms": round(statistics.median(times), 3)}
                windows.append(found | held(device, training.pinned_bytes()))
                times.clear()
    return {
        "steps": steps,
        "wall_s": round(time.perf_counter() - start, 1),
        "kinds": dict(kinds),
        **judged(windows),
        "windows": windows,
    }


def judged(windows: list[dict[str, Any]]) -> dict[str, Any]:
    """What grew from the second quarter on, by the fitted line, and how much slower it became."""
    quarter = len(windows) // 4
    later, second, last = windows[quarter:], windows[quarter : 2 * quarter], windows[-quarter:]
    names = [name for name in windows[0] if name not in ("step", "step_ms")]
    grown = {name: _grown([each[name] for each in later]) for name in names}
    slower = _median_ms(last) / _median_ms(second)
    return {"grown": grown, "slower": round(slower, 3)}


def _median_ms(windows: list[dict[str, Any]]) -> float:
    return statistics.median(each["step_ms"] for each in windows)


def _grown(values: list[int]) -> int:
    """The rise of the line fitted to ``values`` from the first of them to the last."""
    fitted = statistics.linear_regression(range(len(values)), values)
    return round(fitted.slope * (len(values) - 1))


def met(found: dict[str, Any], device: str) -> dict[str, bool]:
    flat = {
        name: grown <= (GROWN_BYTES if name in ("resident_bytes", "reserved_bytes") else 0)
        if name.endswith("_bytes")
        else grown <= GROWN_COUNT
        for name, grown in found["grown"].items()
    }
    words = {f"{name.replace('_', ' ')} flat": is_flat for name, is_flat in flat.items()}
    return {**words, f"step at most {SLOWER:.2f} of before": found["slower"] <= SLOWER}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--engine", choices=tuple(ENGINES), action="append")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    results = Results("long-run", "", options.device, options.out)
    results.command = f"python benchmarks/long_run.py --device {options.device}"
    if options.device == "cpu":
        torch.set_num_threads(1)
    arms: dict[str, Any] = {}
    targets: dict[str, bool] = {}
    for engine in options.engine or ENGINES:
        arms[engine] = found = measure(engine, options.device, options.steps)
        targets |= {f"{engine}: {name}": ok for name, ok in met(found, options.device).items()}
        print(f"{engine}: {found['wall_s']} s, grown {found['grown']}, slower {found['slower']}")
        results.keep({"ok": False, "met": targets, "arms": arms})
    results.close({"ok": all(targets.values()), "met": targets, "arms": arms})


if __name__ == "__main__":
    main()
