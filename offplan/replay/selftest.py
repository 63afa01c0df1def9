"""One case of ``offplan verify``: replayed at the floor, at every pace, and compared bit for bit.

1.  The target is built from its name, as a user's is, traced, and planned with everything movable
    moved, whatever its size.  What the case claims is asked of that plan before anything runs.
2.  A *session* begins with the parameters, buffers and inputs as they were built, and runs
    ``STEPS`` training steps.  Gradients are added up over a session.  After each step every
    parameter that has a gradient moves by a small constant against its sign, so that no step saves
    the bytes of the one before.
3.  Recorded after each step: the loss, every gradient, buffer and input, the outputs as they are
    after the backward, and once more those of the step before, which are kept that long.  The
    device is not waited for within a session.
4.  The plan without its transfers runs two sessions, the *reference* and the *control*.  Where
    these differ, nothing is proved.  Then the plan runs a session for each pace and repeat.
5.  A tensor of up to ``EXACT_BYTES`` is compared element by element; a larger one by its
    fingerprint, taken at once, so that a session of a large model needs no copies of it.
6.  In each session the offloaded and reloaded bytes are those of the plan, less what the idle
    regions of a case would have reloaded.

Kernels that repeat their results are asked for, as ``offplan run`` asks for them; and random
numbers that the seed decides, which those of a checkpoint's are not on a GPU, where torch keeps
generators of their own for them, seeded as they first run.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from offplan.budget import EVERYTHING
from offplan.errors import OffplanError
from offplan.graph import Compiler, Partitioner, TargetRef
from offplan.measured import PinName
from offplan.plan import Plan, check_plan, make_plan
from offplan.replay.arm import DrawnOn, nondeterministic, repeatable
from offplan.replay.cases import CASES, Case, Kernel
from offplan.replay.claims import Evidence, unmet
from offplan.replay.compiled import Replay, build_real, loss_of
from offplan.replay.fingerprint import fingerprints
from offplan.replay.gauge import input_tensors
from offplan.replay.measure import SEED, without_transfers
from offplan.replay.messages import Fingerprint
from offplan.replay.pace import PacedLink, paced
from offplan.replay.packing import window
from offplan.replay.runtime import RuntimeStats, present_device
from offplan.replay.verify import distance
from offplan.target import Target, describe, user_line
from offplan.trace._torch import functorch_config, reset_dynamo, storage_key, tree_leaves
from offplan.trace.capture import TraceOptions, trace
from offplan.verified import PACES, CaseResult, Difference, Outcome, Pace, What

STEPS = 3
EXACT_BYTES = 2**20
# More differences of one pace are counted, not kept.
_MOST_KEPT = 6
# How far a parameter moves in a step.
_STRIDE = 2.0**-7

_BACKENDS: Mapping[Kernel, SDPBackend] = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What to verify: the built-in case of that ``name``, or else ``target``."""

    name: str
    target: TargetRef
    is_case: bool
    device: str
    compiler: Compiler
    repeats: int
    pin: PinName = "register"


class NotHereError(OffplanError):
    """The device has not what a case needs."""


@dataclass(frozen=True)
class _Subject:
    """A target with what is known of it."""

    about: str
    target: TargetRef
    partitioner: Partitioner = "min-cut"
    case: Case | None = None


def verify_one(asked: Asked) -> CaseResult:
    """What becomes of it; whatever goes wrong is a result, too."""
    start = time.perf_counter()
    subject = _subject(asked)
    result = CaseResult(
        name=asked.name, about=subject.about, target=subject.target, outcome="failed"
    )
    try:
        result = _Trial(asked, subject, result).result()
    except NotHereError as error:
        result = msgspec.structs.replace(result, outcome="not here", message=error.what)
    except OffplanError as error:
        result = msgspec.structs.replace(result, message=str(error))
    except (Exception, SystemExit) as error:  # of the user's model, which can raise anything
        said = "\n".join(filter(None, (describe(error), _at(error))))
        result = msgspec.structs.replace(result, message=said)
    finally:
        reset_dynamo()
    return msgspec.structs.replace(result, wall_s=round(time.perf_counter() - start, 3))


def _at(error: BaseException) -> str:
    line = user_line(error)
    return f"  at: {line}" if line else ""


def _subject(asked: Asked) -> _Subject:
    case = next((each for each in CASES if asked.is_case and each.name == asked.name), None)
    if case is None:
        return _Subject("your own target", asked.target)
    return _Subject(case.about, case.target, case.partitioner, case)


# --- one case -------------------------------------------------------------------------------------


class _Trial:
    """One case, as far as it has come."""

    def __init__(self, asked: Asked, subject: _Subject, result: CaseResult) -> None:
        self.asked, self.subject, self.so_far = asked, subject, result
        self.device = present_device(
            asked.device,
            doing="to verify on",
            fix="verify with --device cpu, or on a machine with a GPU",
        )
        self.found = _Found()

    def result(self) -> CaseResult:
        case = self.subject.case
        if case is not None and case.only not in ("", self.device.type):
            raise NotHereError(f"only where --device is {case.only}")
        seeded = functorch_config.patch(graphsafe_rng_functionalization=False)
        with _heard() as heard, repeatable(True), seeded, self._kernel(case):
            found = self._verified()
        said = tuple(dict.fromkeys(nondeterministic([str(each.message) for each in heard])))
        return msgspec.structs.replace(found, nondeterministic=said)

    def _kernel(self, case: Case | None) -> AbstractContextManager[Any]:
        """The attention kernel that the case is about, where this device has it."""
        if case is None or case.kernel is None:
            return nullcontext()
        kernel = case.kernel
        if self.device.type == "cpu":
            return sdpa_kernel(_BACKENDS["math" if kernel == "math" else "flash"])
        _check_kernel(kernel, self.device)
        return sdpa_kernel(_BACKENDS[kernel])

    def _verified(self) -> CaseResult:
        asked, target = self.asked, self.subject.target
        options = TraceOptions(
            self.device.type, partitioner=self.subject.partitioner, compiler=asked.compiler
        )
        facts = trace(target.spec, target.params, options)
        plan = make_plan(facts, budget=EVERYTHING, min_bytes=0)
        check_plan(facts, plan)
        self.so_far = msgspec.structs.replace(
            self.so_far, moved_bytes=plan.moved_bytes, transfers=len(plan.transfers)
        )
        case = self.subject.case
        missing = () if case is None else unmet(case.claims, Evidence(facts, plan))
        if missing:
            return self._with("does not test what it says", unmet=missing)
        reference, control = self._without_plan(plan)
        self.found.of_session(reference, control, "as they come", 0)
        if self.found.count:
            return self._with("does not repeat")
        with self._loop(plan) as loop:
            for repeat in range(asked.repeats):
                for pace in PACES:
                    self._compare(loop, reference, pace, repeat)
        return self._with("different" if self.found.count else "same")

    def _without_plan(self, plan: Plan) -> tuple[_Recorded, _Recorded]:
        """The reference and the control.  Their model is gone when another is built."""
        with self._loop(without_transfers(plan)) as loop:
            return loop.session("as they come", 0), loop.session("as they come", 0)

    def _loop(self, plan: Plan) -> _Loop:
        # What was compiled for the other loop is of no use to this one.
        reset_dynamo()
        if self.subject.case is None:
            # A user's model may not fit twice; collecting takes longer than a small case does.
            gc.collect()
        return _Loop(self.subject.target, plan, self.device, self.asked.pin)

    def _compare(self, loop: _Loop, reference: _Recorded, pace: Pace, repeat: int) -> None:
        found = loop.session(pace, repeat)
        case = self.subject.case
        idle = case.idle if case is not None else frozenset()
        self.found.of_counts(_planned(loop.plan, idle), found.moved, pace, repeat)
        for said in found.misordered:
            self.found.add(Difference(what="order of copies", pace=pace, repeat=repeat, found=said))
        self.found.of_session(reference, found, pace, repeat)
        self.so_far = msgspec.structs.replace(
            self.so_far,
            sessions=self.so_far.sessions + 1,
            steps=self.so_far.steps + STEPS,
            tensors=len([key for key in reference.tensors if key.step == STEPS - 1]),
        )

    def _with(self, outcome: Outcome, **more: Any) -> CaseResult:
        return msgspec.structs.replace(
            self.so_far,
            outcome=outcome,
            difference_count=self.found.count,
            differences=tuple(self.found.first),
            **more,
        )


@contextmanager
def _heard() -> Iterator[list[warnings.WarningMessage]]:
    """Warnings, each once: kernels that do not repeat their results say so in one."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default")
        yield heard


def _check_kernel(kernel: Kernel, device: torch.device) -> None:
    """Raise ``NotHereError`` if the device does not run that attention kernel."""
    if kernel == "math":
        return
    dtype = torch.float32 if kernel == "efficient" else torch.bfloat16
    one = torch.empty(2, 4, 20, 16, dtype=dtype, device=device, requires_grad=True)
    params = torch.backends.cuda.SDPAParams(one, one, one, None, 0.25, False, False)
    can_use = {
        "flash": torch.backends.cuda.can_use_flash_attention,
        "efficient": torch.backends.cuda.can_use_efficient_attention,
        "cudnn": torch.backends.cuda.can_use_cudnn_attention,
    }
    with sdpa_kernel(_BACKENDS[kernel]):
        if not can_use[kernel](params):
            raise NotHereError(f"the device has no {kernel} attention")


class _Moved(NamedTuple):
    """Bytes and transfers of a session."""

    to_host_bytes: int
    to_device_bytes: int
    to_host_count: int
    to_device_count: int


_NAMES: tuple[What, ...] = (
    "bytes to the host",
    "bytes to the device",
    "transfers to the host",
    "transfers to the device",
)


def _planned(plan: Plan, idle: frozenset[int]) -> _Moved:
    """What a session moves of ``plan`` (definition 6)."""
    out = [each.transfer_bytes for each in plan.transfers]
    back = [
        each.transfer_bytes
        for each in plan.transfers
        if each.reload_at is not None and each.region not in idle
    ]
    return _Moved(STEPS * sum(out), STEPS * sum(back), STEPS * len(out), STEPS * len(back))


def _between(before: RuntimeStats, after: RuntimeStats) -> _Moved:
    return _Moved(
        after.offloaded_bytes - before.offloaded_bytes,
        after.reloaded_bytes - before.reloaded_bytes,
        after.offload_count - before.offload_count,
        after.reload_count - before.reload_count,
    )


# --- sessions -------------------------------------------------------------------------------------


class _Key(NamedTuple):
    step: int
    what: What
    name: str


# What is kept of a tensor (definition 5).
_Kept = torch.Tensor | Fingerprint


class _Recorded(NamedTuple):
    """What a session left: its tensors, on the host; what it moved; copies out of order."""

    tensors: Mapping[_Key, _Kept]
    moved: _Moved
    misordered: tuple[str, ...]


class _Loop:
    """A target under a plan, trained from the same beginning again and again."""

    def __init__(self, target: TargetRef, plan: Plan, device: torch.device, pin: PinName) -> None:
        self.plan = plan
        torch.manual_seed(SEED)
        with DrawnOn(device):
            self.target = build_real(target.spec, target.params, device)
        self.replay = Replay(self.target, plan, device=device, pin=pin)
        self.link: PacedLink = paced(self.replay.runtime.link)
        self.replay.runtime.link = self.link
        self._beginning = [(flat, flat.to("cpu", copy=True)) for flat in _storages(self.target)]

    def __enter__(self) -> _Loop:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.replay.close()

    def session(self, pace: Pace, repeat: int) -> _Recorded:
        """Definitions 2 and 3."""
        for flat, before in self._beginning:
            flat.copy_(before)
        for tensor in (*self.target.model.parameters(), *input_tensors(self.target)):
            tensor.grad = None
        self.link.set_pace(pace, repeat)
        self.link.misordered.clear()
        stats = self.replay.stats()
        kept: dict[_Key, _Kept] = {}
        earlier: tuple[torch.Tensor, ...] = ()
        for step in range(STEPS):
            earlier = self._step(step, earlier, kept)
        # Nothing was waited for until here.
        tensors = {key: _on_host(found) for key, found in kept.items()}
        moved = _between(stats, self.replay.stats())
        return _Recorded(tensors, moved, tuple(self.link.misordered))

    def _step(
        self, step: int, earlier: tuple[torch.Tensor, ...], kept: dict[_Key, _Kept]
    ) -> tuple[torch.Tensor, ...]:
        """One step.  Returns its outputs, which are looked at once more after the next."""
        torch.manual_seed(SEED + 1 + step)
        self.link.begin_step()
        self.link.fall_behind()
        output = self.replay.forward()
        loss = loss_of(output)
        self.link.fall_behind()
        loss.backward()
        outputs = tuple(_tensors(output))
        for what, name, tensor in self._compared(loss, outputs, earlier):
            kept[_Key(step, what, name)] = _taken(what, name, tensor)
        with torch.no_grad():
            for parameter in self.target.model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sgn(), alpha=_STRIDE)
        return tuple(each.detach() for each in outputs)

    def _compared(
        self,
        loss: torch.Tensor,
        outputs: Sequence[torch.Tensor],
        earlier: Sequence[torch.Tensor],
    ) -> Iterator[tuple[What, str, torch.Tensor]]:
        yield "loss", "", loss
        for name, parameter in self.target.model.named_parameters():
            if parameter.grad is not None:
                yield "gradient", name, parameter.grad
        for name, buffer in self.target.model.named_buffers():
            yield "buffer", name, buffer
        for number, tensor in enumerate(input_tensors(self.target)):
            yield "input", str(number), tensor
            if tensor.grad is not None:
                yield "gradient", f"input {number}", tensor.grad
        for number, tensor in enumerate(outputs):
            yield "output", str(number), tensor
        for number, tensor in enumerate(earlier):
            yield "output, a step later", str(number), tensor


def _storages(target: Target) -> Iterator[torch.Tensor]:
    """Each storage of the target once, as bytes: what a session may have written."""
    seen = set()
    tensors = (*target.model.parameters(), *target.model.buffers(), *input_tensors(target))
    for tensor in tensors:
        if storage_key(tensor) not in seen and tensor.untyped_storage().nbytes():
            seen.add(storage_key(tensor))
            storage = tensor.untyped_storage()
            yield window(storage, 0, (storage.nbytes(),), (1,))


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of what a model returned, those in the fields of a dataclass too."""
    fields = getattr(output, "__dataclass_fields__", None)
    if fields is not None and not isinstance(output, Mapping):
        output = [getattr(output, name) for name in fields]
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "__dataclass_fields__"):
            yield from _tensors(leaf)


# --- what is kept, and compared -------------------------------------------------------------------


def _taken(what: What, name: str, tensor: torch.Tensor) -> _Kept:
    """A copy on the device, or the fingerprint of what is large."""
    found = tensor.detach().resolve_conj().resolve_neg()
    if found.numel() * found.element_size() <= EXACT_BYTES:
        return found.clone(memory_format=torch.contiguous_format)
    return fingerprints([("buffer", name, found)])[0]


def _on_host(kept: _Kept) -> _Kept:
    return kept.cpu() if isinstance(kept, torch.Tensor) else kept


class _Found:
    """Differences as they are found: how many, and the first."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[Difference] = []

    def add(self, difference: Difference) -> None:
        self.count += 1
        if sum(each.pace == difference.pace for each in self.first) < _MOST_KEPT:
            self.first.append(difference)

    def of_session(self, reference: _Recorded, found: _Recorded, pace: Pace, repeat: int) -> None:
        for key in dict.fromkeys((*reference.tensors, *found.tensors)):
            expected, other = reference.tensors.get(key), found.tensors.get(key)
            if not _is_same(expected, other):
                self.add(_difference(key, expected, other, pace, repeat))

    def of_counts(self, planned: _Moved, moved: _Moved, pace: Pace, repeat: int) -> None:
        for what, expected, found in zip(_NAMES, planned, moved, strict=True):
            if expected != found:
                self.add(
                    Difference(
                        what=what,
                        pace=pace,
                        repeat=repeat,
                        expected=f"{expected:,}",
                        found=f"{found:,}",
                    )
                )


def _is_same(expected: _Kept | None, found: _Kept | None) -> bool:
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        return (
            expected.dtype == found.dtype
            and expected.shape == found.shape
            and torch.equal(_bytes(expected), _bytes(found))
        )
    if isinstance(expected, Fingerprint) and isinstance(found, Fingerprint):
        return expected.bits == found.bits
    return False


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a contiguous tensor, elements times bytes."""
    return tensor.reshape(-1, 1).view(torch.uint8)


def _difference(
    key: _Key, expected: _Kept | None, found: _Kept | None, pace: Pace, repeat: int
) -> Difference:
    where = {"what": key.what, "name": key.name, "pace": pace, "repeat": repeat, "step": key.step}
    if isinstance(expected, Fingerprint) and isinstance(found, Fingerprint):
        far = distance(expected, found)
        return Difference(
            **where,
            expected=expected.bits,
            found=found.bits,
            off_by=far if far < float("inf") else None,
        )
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        return Difference(**where, expected=_kind(expected), found=_kind(found))
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return Difference(**where, expected=_kind(expected), found=_kind(found))
    others = (_bytes(expected) != _bytes(found)).any(-1)
    return Difference(
        **where,
        elements=int(others.sum()),
        of_elements=expected.numel(),
        off_by=_off_by(expected.reshape(-1)[others], found.reshape(-1)[others]),
    )


def _kind(kept: _Kept | None) -> str:
    if isinstance(kept, torch.Tensor):
        return f"{str(kept.dtype).removeprefix('torch.')}{list(kept.shape)}"
    return "none" if kept is None else kept.bits


def _off_by(expected: torch.Tensor, found: torch.Tensor) -> float | None:
    if expected.is_complex():
        expected, found = torch.view_as_real(expected), torch.view_as_real(found)
    largest = (expected.double() - found.double()).abs().max().item()
    return largest if largest < float("inf") else None
