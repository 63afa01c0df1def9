"""Measured op times: what each op of a replay's step takes on its device, cached by shape.

1.  A step of the replay runs under a dispatch mode, which follows the timeline of the replay's
    facts: an op that runs is the timeline's next one if its overload and the sizes and types of its
    tensors are that one's.  Ops that are not on the timeline (a loss outside the graphs, the
    accumulation of gradients) are passed over.  So an op is found by ``costs.op_key``, and
    nothing but the facts is needed to look it up.
2.  The first op with a key is run a few more times, on the arguments that it has, and the shortest
    run counts.  Ops that write their inputs, views, and ops that do not fit into memory a second
    time are left out: their times come from the roofline.
3.  On the GPU a run is timed between events, behind a computation that keeps the device busy until
    it is issued, less what two events take with nothing between them.  All are then scaled to what
    whole steps take (``costs.as_in_a_step``).
4.  The *cache* is one file for each GPU and version of torch, under the user's cache directory.  It
    is written whole, after what others have added since is read again, so that processes at the
    same time can lose each other's last measurements, but never break the file.

Random-number state is as it was after a measurement; gradients accumulate as in any step.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from offplan.costs import as_in_a_step, op_key, profile_for
from offplan.errors import OutputError, UsageError
from offplan.files import FileKind, make_folder, write_atomically
from offplan.graph import GraphFacts, Op, Value, timeline
from offplan.kept import folder
from offplan.replay.compiled import Replay, loss_of
from offplan.roofline import is_view
from offplan.trace._torch import OpOverload, TorchDispatchMode, tree_leaves

logger = logging.getLogger("offplan")

TIMES_FILE = FileKind("a file of op times", b'{"op_times_of":')

_RUNS = 5
_STEPS = 5

Run = Callable[[], Any]
# The seconds of one run.
Timed = Callable[[Run], float]


class OpTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cache file: device milliseconds by op key."""

    op_times_of: str
    torch: str
    times_ms: dict[str, float]


def measured_op_times(
    replay: Replay, known: Mapping[str, float] | None = None, *, timed: Timed | None = None
) -> dict[str, float]:
    """Device milliseconds by ``op_key`` of the ops of one step of ``replay``, and those ``known``.

    Only ops that are not known are run again.  ``replay`` should be without a plan: ops that read
    what was moved are the same ones, but memory is short where there is one.
    """
    if replay.facts is None:
        replay.step()
    assert replay.facts is not None
    timed = timed or (_CudaTimed(replay.device) if replay.device.type == "cuda" else _clock_timed)
    devices = [replay.device] if replay.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        _Stopwatch(replay.facts, dict(known or {}), timed) as found,
    ):
        loss_of(replay.forward()).backward()
    if replay.device.type != "cuda":
        return found.times_ms
    try:
        profile = profile_for(replay.facts.gpu)
    except UsageError:
        return found.times_ms
    return as_in_a_step(replay.facts, profile, found.times_ms, _step_ms(replay))


def _step_ms(replay: Replay) -> float:
    """The median of some steps, between events on the compute stream."""
    times = []
    for _ in range(_STEPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay.step()
        end.record()
        torch.cuda.synchronize(replay.device)
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def timeable_keys(facts: GraphFacts) -> set[str]:
    """The keys that a measurement of ``facts`` fills in, if nothing goes wrong (definition 2)."""
    return {op_key(facts, op) for op in timeline(facts) if _is_timeable(facts, op)}


def _is_timeable(facts: GraphFacts, op: Op) -> bool:
    # What has no overload never reaches a dispatch mode.
    return op.target.count(".") > 1 and not op.mutates and not is_view(facts, op)


class _Stopwatch(TorchDispatchMode):
    """Follows the timeline, and times ops that have no time yet (definitions 1 and 2)."""

    # Their timeline entries have no overload; what runs inside them is passed over.
    supports_higher_order_operators = True

    def __init__(self, facts: GraphFacts, times_ms: dict[str, float], timed: Timed) -> None:
        super().__init__()
        self.facts = facts
        self.times_ms = times_ms
        self.timed = timed
        # What has no overload never reaches a dispatch mode.
        self.coming = [op for op in timeline(facts) if op.target.count(".") > 1]
        self.place = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let ``torch.compile`` run: the mode only watches."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op = self._next(func, args, kwargs)
        if op is not None and _is_timeable(self.facts, op):
            key = op_key(self.facts, op)
            if key not in self.times_ms:
                with suppress(torch.OutOfMemoryError):
                    self.times_ms[key] = self._shortest_ms(lambda: func(*args, **kwargs))
        return func(*args, **kwargs)

    def _next(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Op | None:
        """The timeline's next op, if it is this call."""
        if self.place == len(self.coming) or not isinstance(func, OpOverload):
            return None
        op = self.coming[self.place]
        if op.target != str(func) or not self._is_call_of(op, args, kwargs):
            return None
        self.place += 1
        return op

    def _is_call_of(self, op: Op, args: Any, kwargs: dict[str, Any]) -> bool:
        expected = {_window(self.facts.values[value]) for value in op.inputs} - {None}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        return expected <= {(tuple(t.shape), str(t.dtype)) for t in tensors}

    def _shortest_ms(self, run: Run) -> float:
        return min(self.timed(run) for _ in range(_RUNS)) * 1000


def _window(value: Value) -> tuple[tuple[int, ...], str] | None:
    """What can be compared; None for what is no tensor, or whose sizes the facts do not have."""
    if value.kind != "tensor" or value.symbolic or value.layout != "strided":
        return None
    return value.shape, f"torch.{value.dtype}"


def _clock_timed(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class _CudaTimed:
    """Definition 3."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.filler = torch.ones(2048, 2048, device=device)
        self.filled = torch.empty_like(self.filler)
        self.nothing_s = 0.0
        self.nothing_s = min(self(lambda: None) for _ in range(4 * _RUNS))

    def __call__(self, run: Run) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.mm(self.filler, self.filler, out=self.filled)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize(self.device)
        return max(start.elapsed_time(end) / 1000 - self.nothing_s, 0.0)


# --- the cache ------------------------------------------------------------------------------------


def cached_op_times(gpu: str, torch_version: str) -> dict[str, float]:
    """What was measured before; empty if nothing was, or if the file cannot be read."""
    path = _cache_file(gpu, torch_version)
    if path is None:
        return {}
    try:
        found = msgspec.json.decode(path.read_bytes(), type=OpTimes)
    except (OSError, msgspec.DecodeError):
        return {}
    same = (found.op_times_of, found.torch) == (gpu, torch_version)
    return found.times_ms if same else {}


def cache_op_times(gpu: str, torch_version: str, times_ms: Mapping[str, float]) -> None:
    """Add ``times_ms`` to what is cached.  Where the cache cannot be written, there is none."""
    merged = {**cached_op_times(gpu, torch_version), **times_ms}
    content = msgspec.json.encode(OpTimes(gpu, torch_version, dict(sorted(merged.items()))))
    path = _cache_file(gpu, torch_version)
    if path is None:
        return
    try:
        make_folder(path.parent)
        write_atomically(path, content + b"\n", TIMES_FILE)
    except OutputError as error:
        logger.info("op times are not kept for the next time: %s", error)


def _cache_file(gpu: str, torch_version: str) -> Path | None:
    above = folder()
    words = "".join(letter if letter.isalnum() else "-" for letter in f"{gpu} {torch_version}")
    return None if above is None else above / "op-times" / f"{words.lower()}.json"
