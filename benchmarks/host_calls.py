"""How long the host takes over one transfer of a compiled graph: its four operators.

    python benchmarks/host_calls.py                  # a GPU
    python benchmarks/host_calls.py --device cpu     # tries the script out: copies take the time

A forward of ``--layers`` layers, each of a few products and some small kernels, hands ``--moves``
values of each to the host; a backward brings them back.  *Warm*, the operators run one after the
other, as nothing else does; *cold*, a little other Python is run before each, as hundreds of
kernels are between two in a step, so that little of what they need is in the processor's caches.
Microseconds of each call, and milliseconds of steps with and without transfers: where the first is
much of the second, the device waits for its host.  Writes ``<gpu>-host-calls.json`` into
``benchmarks/results`` (``--out`` names another folder).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from machine import Results  # noqa: E402

from offplan.replay.host import HostPool  # noqa: E402
from offplan.replay.operators import Operators  # noqa: E402
from offplan.replay.pinning import choose  # noqa: E402
from offplan.replay.runtime import Runtime, Slot, link_for  # noqa: E402

WARM_UP, STEPS = 3, 10
# Products of a layer for each value that moves, and small kernels; values that are on their way.
PRODUCTS, KERNELS, IN_FLIGHT = 3, 3, 3

Calls = dict[str, list[float]]


class Bench:
    def __init__(self, device: torch.device, count: int, size_bytes: int, side: int) -> None:
        self.device, self.count, self.size_bytes = device, count, size_bytes
        pool = HostPool([count * size_bytes], choose("auto", device, count * size_bytes), None)
        self.runtime = Runtime(link_for(device, timing=False), pool)
        self.runtime.add_slots(
            [
                Slot(f"value {n}", 0, size_bytes, size_bytes, (), 2, n * size_bytes, (1,))
                for n in range(count)
            ]
        )
        # The operators go with the object that made them.
        self.operators = Operators(self.runtime)
        self.ops = self.operators.ops
        self.left, self.right = (torch.randn(side, side, device=device).half() for _ in range(2))
        self.small = torch.zeros(1024, device=device)
        self.calls: Calls = defaultdict(list)
        self.before_each: Callable[[], Any] = lambda: None

    def close(self) -> None:
        self.runtime.close()
        self.operators.close()

    def compute(self) -> None:
        for _ in range(KERNELS):
            self.small.add_(1)
        for _ in range(PRODUCTS):
            torch.mm(self.left, self.right)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        self.before_each()
        start = time.perf_counter()
        yield
        self.calls[name].append(1e6 * (time.perf_counter() - start))

    def step(self, *, moves: bool) -> tuple[float, float]:
        """Milliseconds of a forward and a backward."""
        self.settle()
        start = time.perf_counter()
        with self.runtime.forward_run(self.count * self.size_bytes):
            hosts = self.forward(moves=moves)
        self.settle()
        between = time.perf_counter()
        with self.runtime.backward_run():
            self.backward(hosts)
        self.settle()
        return 1e3 * (between - start), 1e3 * (time.perf_counter() - between)

    def forward(self, *, moves: bool) -> list[torch.Tensor | None]:
        hosts: list[torch.Tensor | None] = []
        sending: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        for number in range(self.count):
            value = torch.empty(self.size_bytes // 2, dtype=torch.bfloat16, device=self.device)
            self.compute()
            if not moves:
                hosts.append(None)
                continue
            with self.call("offload"):
                host = self.ops.offload(value, number, self.size_bytes)
            hosts.append(host)
            sending.append((host, value, number))
            del value
            if len(sending) > IN_FLIGHT:
                self.release(*sending.pop(0))
        while sending:
            self.release(*sending.pop(0))
        return hosts

    def release(self, host: torch.Tensor, value: torch.Tensor, number: int) -> None:
        with self.call("release"):
            self.ops.release(host, value, number)

    def backward(self, hosts: list[torch.Tensor | None]) -> None:
        for number in reversed(range(self.count)):
            host = hosts[number]
            if host is None:
                self.compute()
                self.compute()
                continue
            with self.call("reload"):
                buffer = self.ops.reload(host, number, self.size_bytes, torch.bfloat16)
            self.compute()
            self.compute()
            with self.call("wait"):
                self.ops.wait(buffer)

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def other_python() -> Callable[[], Any]:
    """A little of what is run between two operators of a step, of the interpreter and beyond."""
    values = {str(number): [number] * 5 for number in range(300)}
    block = torch.zeros(1 << 20)
    return lambda: (json.loads(json.dumps(values)), block.sum())


QUANTILES = {"least_us": 0.0, "median_us": 0.5, "p90_us": 0.9, "most_us": 1.0}


def quantiles(values: list[float]) -> dict[str, float]:
    values = sorted(values)
    last = len(values) - 1
    return {name: round(values[int(part * last)], 1) for name, part in QUANTILES.items()}


def steps(bench: Bench, *, moves: bool) -> dict[str, float]:
    """The medians of several."""
    times = zip(*(bench.step(moves=moves) for _ in range(STEPS)), strict=True)
    forward_ms, backward_ms = (round(statistics.median(each), 2) for each in times)
    return {"forward_ms": forward_ms, "backward_ms": backward_ms}


def measured(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, before in (("warm", lambda: None), ("cold", other_python())):
        bench.before_each = before
        for _ in range(WARM_UP):
            bench.step(moves=True)
        bench.calls.clear()
        times = steps(bench, moves=True)
        calls = {call: quantiles(us) for call, us in bench.calls.items()}
        found[name] = {"calls": calls, **times}
    return {**found, "nothing_moves": steps(bench, moves=False)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--moves", type=int, default=5, help="values of a layer that move")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    results = Results("host-calls", "", options.device, options.out)
    results.command = "python benchmarks/host_calls.py"
    is_gpu = options.device == "cuda"
    device = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
    count = options.layers * options.moves
    size_bytes, side = (24 << 20, 4096) if is_gpu else (1 << 16, 64)
    bench = Bench(device, count, size_bytes, side)
    try:
        found = measured(bench)
    finally:
        bench.close()
    for name, values in found.items():
        print(name, json.dumps(values))
    results.close({"ok": True, "transfers": count, "transfer_bytes": size_bytes, **found})


if __name__ == "__main__":
    main()
