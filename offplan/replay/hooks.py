"""Offload for eager models, on autograd's saved-tensor hooks; no compiler, no plan.

1.  While an ``ActivationOffload`` is entered, every tensor that autograd saves on this thread
    passes through it.  Storages are moved as ``replay.saved`` describes: one copy for all saved
    views of one, and exact views on one storage on the way back, in whatever backward reads them.
2.  The *rule* of a storage is the first that holds: ``unsupported`` (not a plain strided tensor, or
    on another device), ``host``, ``empty``, ``parameter`` (of the modules or tensors named as
    ``parameters``, or an ``nn.Parameter``, views too), ``input`` (a leaf that needs a gradient, or
    named with ``leave``; views too), ``in_backward`` (saved by a backward: for a second one, or by
    a reentrant checkpoint that is recomputed), ``too_small`` (the whole storage),
    ``not_checkpoint`` (where only inputs of checkpoints are moved), ``alias`` (the step before
    found it held by something else: an output, an input that needs no gradient).  Others are
    candidates.
3.  Nobody can tell while it is saved whether a storage will be held by something else after the
    forward.  It is then copied in the first step, to no use; its holder keeps it on the device, the
    backward reads it there, it is counted as found, and in later steps it is ``alias``.
4.  A saved tensor that was modified in place is refused in the backward, with autograd's words.
    Modifications behind autograd's back (``.data``) are not seen; a backward of your own must not
    write to the tensors it saved.
5.  Where entered offloads are nested, autograd asks the inner one alone.
6.  An *input of a checkpoint* is what ``torch.utils.checkpoint`` saves itself, recognised by the
    frames that call the hook.  So do Hugging Face's ``GradientCheckpointingLayer``s, which call it.
    What such a block saves inside is recomputed, and never seen here.

An offload belongs to one thread at a time; others may have their own.  Not handled: compiled
modules inside (their saved tensors are moved as any others are), and computing on several streams.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from torch.autograd import function as autograd_function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

from offplan.errors import UsageError
from offplan.replay.runtime import ReplayError, explained
from offplan.replay.saved import Mover, Record, Tally, View, check_version
from offplan.trace._torch import storage_key, torch_c, tree_leaves

_NO_STORAGE = Tally()


@dataclass(frozen=True)
class OffloadStats:
    """Totals since the offload was made, of storages: each is *seen* once in a forward.

    ``seen`` = ``moved`` + ``kept`` + all ``skipped``, which are by rule.  ``kept``: candidates that
    stayed, being the last ones, ``over_budget`` (host memory had no room for all), or modified.
    Every moved storage was copied to the host once.  ``reloaded`` counts copies back, ``found``
    moved storages that something else still held, so that they were not reloaded.
    ``peak_host_bytes`` were in use at most; ``host_pinned_bytes`` are taken now.  ``stalled_ms`` is
    what the compute stream waited for copies; None unless timed.
    """

    seen: Tally
    moved: Tally
    kept: Tally
    over_budget: Tally
    skipped: Mapping[str, Tally]
    reloaded: Tally
    found: Tally
    run_count: int
    peak_host_bytes: int
    host_pinned_bytes: int
    stalled_ms: float | None


class ActivationOffload:
    """Moves what autograd saves while it is entered; enter it around each forward.

    Made once and entered in each step, it keeps host memory between steps, and learns from one how
    the next will go.  ``close`` gives the memory back, after the last backward; so does dropping
    it, and all graphs made under it.
    """

    def __init__(
        self,
        mover: Mover,
        device: torch.device,
        owners: Owners,
        min_offload_bytes: int,
        checkpointed_inputs_only: bool,
    ) -> None:
        self.mover = mover
        self.device = device
        self.min_offload_bytes = min_offload_bytes
        self.checkpointed_inputs_only = checkpointed_inputs_only
        self._owners = owners
        self._own: set[int] = set()
        self._left: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._records: weakref.WeakValueDictionary[tuple[int, int], Record] = (
            weakref.WeakValueDictionary()
        )
        self._entered: list[saved_tensors_hooks] = []
        self._thread: int | None = None
        self._is_fresh = True
        self._seen = Tally()
        self._skipped: dict[str, Tally] = {}
        self._counted: set[int] = set()

    # --- in use -----------------------------------------------------------------------------------

    def __enter__(self) -> ActivationOffload:
        if self.mover.is_closed:
            raise ReplayError("the offload is closed", fix="make a new one")
        if self._thread not in (None, threading.get_ident()):
            raise ReplayError(
                "the offload is in use on another thread", fix="make one for each thread"
            )
        self._thread = threading.get_ident()
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        if not self._entered:
            self._is_fresh = True
        self._entered.append(hooks)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._entered.pop().__exit__(kind, error, traceback)
        if not self._entered:
            self._thread = None
            self.mover.end_forward()

    def leave(self, *trees: Any) -> None:
        """Leave the storages of all tensors in ``trees`` on the device for as long as they live.

        For what the caller holds anyway, such as inputs that need no gradient.
        """
        self._left = {key: ref for key, ref in self._left.items() if ref() is not None}
        for leaf in tree_leaves(trees):
            if isinstance(leaf, torch.Tensor) and _plain_rule(leaf, self.device) == "":
                self._left[storage_key(leaf)] = weakref.ref(leaf.untyped_storage())

    def close(self) -> None:
        """Wait for copies in flight, and give the host memory back.

        What a forward has saved there, whose backward has not run, is lost: that backward raises
        ``ReplayError``.
        """
        self.mover.close()

    def stats(self) -> OffloadStats:
        """Totals so far; where stalls are timed, waits for the device."""
        totals, shelf = self.mover.totals, self.mover.shelf
        with explained("reading how long copies were waited for"):
            stalled_ms = self.mover.link.stalled_ms()
        kept = self._seen
        for part in (totals.offloaded, *self._skipped.values()):
            kept = Tally(kept.count - part.count, kept.bytes - part.bytes)
        return OffloadStats(
            seen=self._seen,
            moved=totals.offloaded,
            kept=kept,
            over_budget=totals.over_budget,
            skipped=MappingProxyType(
                {rule: part for rule, part in self._skipped.items() if part.count}
            ),
            reloaded=totals.reloaded,
            found=totals.found,
            run_count=totals.run_count,
            peak_host_bytes=shelf.asked_bytes,
            host_pinned_bytes=shelf.pinned_bytes,
            stalled_ms=stalled_ms,
        )

    # --- what autograd calls ----------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Any:
        is_in_backward = _is_in_backward()
        if self._is_fresh and not is_in_backward:
            self._begin()
        rule = _plain_rule(tensor, self.device)
        if rule and rule != "empty":
            self._skip(rule, tensor.numel() * tensor.element_size())
            return _Whole(tensor)
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        # A storage that has died leaves its address to another, and its record may live on.
        record = self._records.get((key, tensor._version))
        if record is not None and record.live() is storage:
            self._promote(record, is_in_backward)
            return View(record, tensor)
        rule = rule or self._rule(tensor, key, storage.nbytes(), is_in_backward)
        if rule and rule != "not_checkpoint":
            self._skip_once(key, rule, storage.nbytes())
            return _Whole(tensor)
        record = self._records[key, tensor._version] = Record(self.mover, tensor, rule)
        self._seen = self._seen.plus(record.size_bytes)
        self._take(record)
        return View(record, tensor)

    def _unpack(self, packed: Any) -> torch.Tensor:
        packed.check_version()
        if isinstance(packed, _Whole):
            return packed.tensor
        if not self._is_fresh and _is_in_backward():
            self._is_fresh = True
            self.mover.end_forward()
        return self.mover.bring(packed)

    def _promote(self, record: Record, is_in_backward: bool) -> None:
        """Move a storage that a checkpoint takes as its input after others have saved it."""
        if record.rule == "not_checkpoint" and not is_in_backward and _is_checkpoint_input():
            self._skipped[record.rule] = self._skipped[record.rule].plus(record.size_bytes, -1)
            record.rule = ""
            self._take(record)

    def _take(self, record: Record) -> None:
        if not record.rule and not self.mover.add(record):
            record.rule = "alias"
        if record.rule:
            self._skipped[record.rule] = self._tally(record.rule).plus(record.size_bytes)

    def _skip(self, rule: str, size_bytes: int) -> None:
        self._seen = self._seen.plus(size_bytes)
        self._skipped[rule] = self._tally(rule).plus(size_bytes)

    def _skip_once(self, key: int, rule: str, size_bytes: int) -> None:
        """Count a storage that no record is made of once in a forward."""
        if key not in self._counted:
            self._counted.add(key)
            self._skip(rule, size_bytes)

    def _tally(self, rule: str) -> Tally:
        return self._skipped.get(rule, _NO_STORAGE)

    def _begin(self) -> None:
        """Another forward: parameters may have been given other storages since the last."""
        self._is_fresh = False
        self._counted.clear()
        self.mover.begin_run()
        self._own = {
            storage_key(tensor)
            for tensor in self._owners.tensors()
            if _plain_rule(tensor, self.device) == ""
        }

    def _rule(self, tensor: torch.Tensor, key: int, size_bytes: int, is_in_backward: bool) -> str:
        """Why a plain tensor's storage is not moved; empty if it may be (definition 2)."""
        if key in self._own:
            return "parameter"
        owner = tensor._base if tensor._is_view() else tensor
        if type(owner) is torch.nn.Parameter:
            return "parameter"
        left = self._left.get(key)
        if (left is not None and left() is not None) or (owner.is_leaf and owner.requires_grad):
            return "input"
        if is_in_backward:
            return "in_backward"
        if size_bytes < self.min_offload_bytes:
            return "too_small"
        if self.checkpointed_inputs_only and not _is_checkpoint_input():
            return "not_checkpoint"
        return ""


class _Whole:
    """A saved tensor that is left as it is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached, since the graph must not hold itself.
        self.tensor = tensor.detach()
        self.version = tensor._version

    def check_version(self) -> None:
        check_version(self.tensor, self.version, self.tensor.dtype, self.tensor.shape)


def _plain_rule(tensor: torch.Tensor, device: torch.device) -> str:
    """Why a tensor has no storage that could be moved from ``device``; empty if it has one."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not is_plain or tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return "unsupported"
    if tensor.device != device:
        return "host" if tensor.device.type == "cpu" else "unsupported"
    return "" if tensor.untyped_storage().nbytes() else "empty"


def _is_in_backward() -> bool:
    return torch_c._current_graph_task_id() != -1


_FUNCTION_FILE = autograd_function.__file__
_CHECKPOINT_FILE = torch_checkpoint.__file__


def _is_checkpoint_input() -> bool:
    """Whether a checkpoint itself is what saves the tensor being packed (definition 6).

    Up to torch 2.13 through the ``apply`` of an autograd function of its own, later directly.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename in (__file__, _FUNCTION_FILE):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_filename == _CHECKPOINT_FILE


class Owners:
    """What was named as ``parameters``."""

    def __init__(self, given: torch.nn.Module | Iterable[Any] | None) -> None:
        items = [given] if isinstance(given, torch.nn.Module) else list(given or ())
        self._modules = [item for item in items if isinstance(item, torch.nn.Module)]
        self._tensors = [item for item in items if isinstance(item, torch.Tensor)]
        if len(self._modules) + len(self._tensors) < len(items):
            raise UsageError("parameters are a module, or modules and tensors")

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every parameter and buffer, as they are now."""
        yield from self._tensors
        for module in self._modules:
            yield from module.parameters()
            yield from module.buffers()
