"""Run the cases of ``offplan verify``, each in a worker process, several side by side.

1.  A worker takes one case after another (``offplan.pools``): what a case leaves behind is another
    case's to survive.
2.  A worker that is killed, or that a case brings down, fails that case and no other.
3.  Workers ask cuBLAS for kernels that repeat their results, and Inductor to compile in the worker
    itself where there are several.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
import torch

from offplan import __version__
from offplan.errors import DeviceError, OffplanError
from offplan.graph import Compiler, TargetRef
from offplan.measured import Machine, PinName
from offplan.pools import Pools, WorkerLost, awaited, pools, threads
from offplan.replay.arm import machine_here
from offplan.replay.cases import Case
from offplan.replay.measure import REPEATABLE_CUBLAS
from offplan.replay.runtime import present_device
from offplan.replay.selftest import STEPS, Asked, verify_one
from offplan.trace._torch import has_cpp_compiler
from offplan.verified import CaseResult, Verified, verified

_MOST_JOBS = 8
OnDone = Callable[[CaseResult], None]


class Trials(msgspec.Struct, frozen=True, kw_only=True):
    """What all cases have in common; ``jobs`` of them run side by side."""

    device: str
    compiler: Compiler
    repeats: int
    pin: PinName = "register"
    jobs: int | None = None


def verify_all(
    cases: Sequence[Case],
    targets: Sequence[TargetRef],
    trials: Trials,
    on_done: OnDone = lambda result: None,
) -> Verified:
    """What becomes of the ``cases``, and after them of the ``targets``, in that order.

    ``on_done`` hears of each as it is there.  Raises ``DeviceError`` without the device, or what
    the compiler needs for it.
    """
    asked = [_asked(case.name, case.target, trials, is_case=True) for case in cases]
    asked += [_asked(_words(target), target, trials, is_case=False) for target in targets]
    jobs = min(trials.jobs or _default_jobs(trials.device), max(len(asked), 1))
    one_thread = {"TORCHINDUCTOR_COMPILE_THREADS": "1"} if jobs > 1 else {}
    with _environment({**REPEATABLE_CUBLAS, **one_thread}), pools(jobs) as processes:
        machine = _machine(processes, trials.device, trials.compiler)
        found = _all(processes, jobs, asked, on_done)
    return verified(
        found,
        device=trials.device,
        machine=machine,
        compiler=trials.compiler,
        repeats=trials.repeats,
        steps_per_session=STEPS,
        version=__version__,
    )


def _asked(name: str, target: TargetRef, trials: Trials, *, is_case: bool) -> Asked:
    return Asked(
        name=name,
        target=target,
        is_case=is_case,
        device=trials.device,
        compiler=trials.compiler,
        repeats=trials.repeats,
        pin=trials.pin,
    )


def _words(target: TargetRef) -> str:
    return " ".join([target.spec, *(f"{name}={value}" for name, value in target.params.items())])


def _default_jobs(device: str) -> int:
    """All cores, or half of them for a GPU: there a backward runs on a thread of its own."""
    cores = os.cpu_count() or 1
    return max(1, min(cores if device == "cpu" else cores // 2, _MOST_JOBS))


# --- workers --------------------------------------------------------------------------------------


def _machine(processes: Pools, device: str, compiler: Compiler) -> Machine:
    """Where a worker runs.  Raises ``DeviceError`` if it cannot run there."""
    try:
        # By a thread: a signal that comes to the main one would end a process as it starts.
        with threads(1) as asking:
            found = awaited(asking.submit(processes.ask, _machine_of, device, compiler))
    except WorkerLost as error:
        raise DeviceError(
            "the process that looks for the device was ended", fix="see dmesg for why"
        ) from error
    if isinstance(found, Machine):
        return found
    what, fix = found
    raise DeviceError(what, fix=fix)


def _all(processes: Pools, jobs: int, asked: Sequence[Asked], on_done: OnDone) -> list[CaseResult]:
    thread_count = max(1, (os.cpu_count() or 1) // jobs)
    one_at_a_time = threading.Lock()

    def one(each: Asked) -> CaseResult:
        try:
            found = processes.ask(_verify, each, thread_count)
        except WorkerLost:
            found = _lost(each)
        with one_at_a_time:
            on_done(found)
        return found

    with threads(jobs) as pool:
        answers = [pool.submit(one, each) for each in asked]
        return [awaited(answer) for answer in answers]


def _lost(asked: Asked) -> CaseResult:
    return CaseResult(
        name=asked.name,
        about="",
        target=asked.target,
        outcome="failed",
        message="its process was ended, by the system if that ran out of memory, or by an error "
        "that Python does not hear of",
    )


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables for the processes started here, where they are not set; torch reads them early."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _verify(asked: Asked, thread_count: int) -> CaseResult:
    # A second thread costs a small case more than it takes off it.
    torch.set_num_threads(1 if asked.is_case else thread_count)
    return verify_one(asked)


def _machine_of(device: str, compiler: Compiler) -> Machine | tuple[str, str]:
    """The machine, or what it has not, and what to do."""
    if device == "cpu" and compiler == "inductor" and not has_cpp_compiler():
        return (
            "Inductor finds no C++ compiler here, and needs one for the CPU",
            "install one (g++), name it in the variable CXX, or verify with --compiler aot_eager",
        )
    try:
        found = present_device(
            device,
            doing="to verify on",
            fix="verify with --device cpu, or on a machine with a GPU",
        )
        return machine_here(found)
    except OffplanError as error:
        return error.what, error.fix
