"""Run a training step without a plan and with it, each in a fresh process, and compare.

1.  Each arm is a process of its own (``offplan.replay.arm``), so that neither the allocator's
    cache, nor compiled code, nor a leak of one arm reaches another.  They run one after another: a
    GPU and a link shared by two arms would measure neither.
2.  All arms build the model under the same seed and set the random-number state to the same value
    before each step.
3.  A process that this one starts ends with it: at an error, at Ctrl-C (it first gets a moment to
    finish copies in flight), and even if this process is killed, since each watches the pipe that
    its standard input is.
4.  Where host memory is short, a plan is made for what there is: the least of what was asked for
    and of the limits of this machine (``replay.limits``), less what a process takes that has
    started CUDA.  What is given up by that is noted.
5.  With the engine ``hooks`` the arms are eager training without offload and with it, and the
    replays of the plans beside them.
6.  An arm that runs out of memory is a result.  One that ends in any other way is an error: the one
    that it reports, or the last line of what it said.

Nothing here imports torch: the device belongs to the arms.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import msgspec

from offplan.budget import Action, Aim, Budget, of_bytes, parse_budget
from offplan.costs import DeviceProfile, profile_for
from offplan.decide import decide
from offplan.eligibility import DEFAULT_MIN_BYTES, DEFAULT_RULES, RuleSet
from offplan.errors import OffplanError, OutputError, PlanError, UsageError
from offplan.files import GRAPH_FILE, write_atomically
from offplan.graph import Compiler, GraphFacts, Partitioner, TargetRef, load_graph, save_graph
from offplan.measured import (
    SCHEMA_VERSION,
    Engine,
    HostLimits,
    Measurement,
    PinName,
    Role,
    expected,
    planned,
)
from offplan.memory import Conditions
from offplan.plan import ACTIONS, Plan, check_plan, make_plan, write_plan
from offplan.recompute import Choice
from offplan.replay.layout import SLOT_ALIGNMENT_BYTES, laid_out_bytes
from offplan.replay.limits import (
    MARGIN_BYTES,
    PAGE_BYTES,
    least,
    limit_words,
    read_limits,
    reserved_bytes,
    room_bytes,
)
from offplan.replay.messages import (
    Answer,
    ArmRequest,
    ArmResult,
    Failure,
    OpTimesRequest,
    Request,
    Timed,
    TraceRequest,
    read_answer,
    write_message,
)
from offplan.replay.verify import needs_control, verify
from offplan.units import format_size

SEED = 20_240_229
# How long a process may take to end once it was asked to; then it is killed.
_GRACE_S = 15.0
# cuBLAS then repeats its results from run to run; it reads this when it starts.
# Host memory that a process holds once torch and CUDA have started, before a model is built.
_PROCESS_BYTES = 1 << 30
REPEATABLE_CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

OnPhase = Callable[[str], None]


class ArmError(OffplanError):
    """A process that measures ended without a result; the exit code is that of its own error."""


@dataclass(frozen=True)
class RunOptions:
    """How to measure.  ``steps`` follow one warm-up; ``repeat`` adds a control."""

    steps: int = 5
    repeat: bool = False
    verify: bool = True
    host_budget_bytes: int | None = None
    pin: PinName = "register"
    engine: Engine = "compiled"


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for beyond a plan or target; None and empty where nothing is.

    ``limits`` None: those of this machine, read when they are needed.
    """

    device: str | None = None
    compiler: Compiler | None = None
    budget: Budget | None = None
    actions: tuple[Action, ...] | None = None
    rules: RuleSet | None = None
    compare: tuple[RuleSet, ...] = ()
    verify: bool = True
    profile: DeviceProfile | None = None
    host_budget_bytes: int | None = None
    measured_op_times: bool = False
    pin: PinName = "register"
    limits: HostLimits | None = None


@dataclass(frozen=True)
class Replays:
    """The plans to replay, in order; ``plan`` is the one of them that the report is about.

    ``nothing`` moves nothing, and has nothing computed again that is not without a plan.
    """

    plans: tuple[Plan, ...]
    plan: Plan
    nothing: Plan
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Arm:
    role: Role
    plan: Plan
    engine: Engine = "compiled"


@dataclass(frozen=True)
class _Choices:
    """What a plan is made from, besides the graphs."""

    target: TargetRef
    device: str
    compiler: Compiler
    partitioner: Partitioner
    attention: str | None
    rules: RuleSet
    min_bytes: int
    budget: Budget | None
    actions: tuple[Action, ...]
    host_budget_bytes: int | None
    profile: DeviceProfile | None
    conditions: Conditions


def _ignore(phase: str) -> None:
    pass


# --- which plans ----------------------------------------------------------------------------------


def plans_to_replay(
    source: Plan | TargetRef, wanted: Wanted, on_phase: OnPhase = _ignore
) -> Replays:
    """The plan as it is where that is what is wanted; else new ones, from a trace on the device.

    Raises ``UsageError`` for a comparison that moves nothing, or for op times that cannot be
    measured, and what the trace raises.
    """
    choices = _choices(source, wanted)
    if wanted.measured_op_times:
        check_can_measure(choices.compiler)
    room = _room(choices.device, wanted)
    is_new = bool(wanted.compare) or wanted.measured_op_times
    is_as_wanted = not is_new and choices == _choices(source, Wanted())
    if isinstance(source, Plan) and is_as_wanted and room.has(source):
        return Replays((source,), source, _nothing_of(source, choices, wanted, on_phase))
    if wanted.compare and choices.budget is None:
        raise UsageError("--compare needs plans that move something", fix="add --budget 0")
    facts = _traced(choices, wanted.verify, on_phase)
    notes = [*_notes_on_new(source, facts)] if isinstance(source, Plan) else []
    op_ms: dict[str, float] = {}
    if wanted.measured_op_times:
        op_ms, note = op_times(facts, verify_bits=wanted.verify, on_phase=on_phase)
        notes += [note] if note else []
    aim = Aim(
        conditions=msgspec.structs.replace(choices.conditions, deterministic=wanted.verify),
        profile=choices.profile,
        host_bytes=wanted.host_budget_bytes or choices.host_budget_bytes,
        op_ms=op_ms,
        actions=choices.actions,
    )

    def under(asked: Sequence[Choice]) -> GraphFacts:
        return _traced(choices, wanted.verify, on_phase, asked)

    found = [
        _made(facts, choices, rules, aim, room, under)
        for rules in dict.fromkeys(wanted.compare or (choices.rules,))
    ]
    plans = tuple(plan for plan, _ in found)
    plan = next((plan for plan in plans if plan.rules == choices.rules), plans[-1])
    notes += dict.fromkeys(note for _, note in found if note)
    nothing = decide(facts, plan.rules, choices.min_bytes, None, aim)
    return Replays(plans, plan, nothing, tuple(notes))


# --- host memory ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Room:
    """Host memory that a plan may take (definition 4); ``words`` say what leaves no more.

    ``most_bytes`` None: nothing is known to limit it.
    """

    pin: PinName
    most_bytes: int | None
    words: str = ""

    def has(self, plan: Plan) -> bool:
        needed = reserved_bytes(laid_out_bytes(plan.transfers), self.pin)
        return self.most_bytes is None or needed <= self.most_bytes

    def to_plan_for(self, facts: GraphFacts) -> int:
        """What to tell the planner, which adds up the bytes of transfers: less their rounding."""
        most = self.most_bytes or 0
        if self.pin == "torch" and most:
            most = 1 << most.bit_length() - 1
        saved_count = sum(len(region.saved) for region in facts.regions)
        return max(most - saved_count * SLOT_ALIGNMENT_BYTES - PAGE_BYTES, 0)


def _room(device: str, wanted: Wanted) -> _Room:
    pin: PinName = "off" if device == "cpu" or wanted.pin == "auto" else wanted.pin
    margin_bytes = MARGIN_BYTES if device == "cpu" else MARGIN_BYTES + _PROCESS_BYTES
    limit = least(wanted.limits or read_limits(), pin, margin_bytes)
    asked = wanted.host_budget_bytes
    if limit is not None:
        left = room_bytes(limit, margin_bytes)
        if asked is None or left < asked:
            words = limit_words(limit)
            if limit.name == "ulimit -l":
                words += " (raise it, or --pin torch, for which it does not hold)"
            return _Room(pin, left, words)
    return _Room(pin, asked, "" if asked is None else f"--host-budget is {format_size(asked)}")


def _made(
    facts: GraphFacts,
    choices: _Choices,
    rules: RuleSet,
    aim: Aim,
    room: _Room,
    under: Callable[[Sequence[Choice]], GraphFacts],
) -> tuple[Plan, str]:
    """The plan, within the host memory that there is; and what was given up for that, or nothing.

    Raises ``BudgetError`` if no plan within it keeps to the budget.
    """

    def made(host_bytes: int | None) -> Plan:
        limited = replace(aim, host_bytes=host_bytes)
        return decide(facts, rules, choices.min_bytes, choices.budget, limited, under)

    plan = made(aim.host_bytes)
    if not room.has(plan):
        plan = made(room.to_plan_for(facts))
    if plan.predicted.host_budget is None:
        return plan, ""
    free = made(None)
    if free.moved_bytes <= plan.moved_bytes:
        return plan, ""
    peaks = [format_size(each.predicted.plan.peak_bytes) for each in (plan, free)]
    return plan, (
        f"host pinned memory: {room.words}, so that {format_size(plan.moved_bytes)} move, not "
        f"{format_size(free.moved_bytes)}, for a predicted peak of {peaks[0]}, not {peaks[1]}"
    )


# --- choices --------------------------------------------------------------------------------------


def _choices(source: Plan | TargetRef, wanted: Wanted) -> _Choices:
    """The choices of ``source``, where nothing else is wanted."""
    if isinstance(source, TargetRef):
        return _Choices(
            target=source,
            device=wanted.device or "cuda",
            compiler=wanted.compiler or "aot_eager",
            partitioner="min-cut",
            attention=None,
            rules=wanted.rules or DEFAULT_RULES,
            min_bytes=DEFAULT_MIN_BYTES,
            budget=wanted.budget,
            actions=wanted.actions or ACTIONS,
            host_budget_bytes=wanted.host_budget_bytes,
            profile=wanted.profile,
            conditions=Conditions(),
        )
    device = wanted.device or source.device
    named = device == "cuda" and source.attention not in ("", "auto")
    return _Choices(
        target=source.target,
        device=device,
        compiler=wanted.compiler or source.compiler,
        partitioner="default" if source.partitioner == "default" else "min-cut",
        attention=source.attention if named else None,
        rules=wanted.rules or source.rules,
        min_bytes=source.min_bytes,
        budget=wanted.budget or _budget_of(source),
        actions=wanted.actions or source.actions,
        host_budget_bytes=source.predicted.host_budget,
        profile=wanted.profile or _profile_of(source, device),
        conditions=source.predicted.conditions,
    )


def _profile_of(plan: Plan, device: str) -> DeviceProfile | None:
    """The shipped profile that ``plan`` was made with, if it was; None leaves it to the GPU's."""
    if device == "cpu" or not plan.predicted.profile:
        return None
    try:
        return profile_for(plan.predicted.profile)
    except UsageError:
        return None


def _budget_of(plan: Plan) -> Budget | None:
    """What ``plan`` was asked for."""
    if plan.asked:
        return parse_budget(plan.asked)
    return None if plan.budget is None else of_bytes(plan.budget)


def _notes_on_new(plan: Plan, facts: GraphFacts) -> Iterator[str]:
    """That the graphs are not those of ``plan``, and why."""
    pairs = ((plan.device, facts.device), (plan.compiler, facts.compiler))
    changed = [pair for pair in pairs if pair[0] != pair[1]]
    if changed:
        old, new = (" and ".join(words) for words in zip(*changed, strict=True))
        yield f"the plan is for {old}; it was planned again for {new}"
        return
    try:
        check_plan(facts, plan)
    except PlanError as error:
        yield f"planned again, from the target as it is now: {error.what}"


def _nothing_of(plan: Plan, choices: _Choices, wanted: Wanted, on_phase: OnPhase) -> Plan:
    """What ``plan`` is compared with: where it has ops run again, from the graphs without that."""
    if not plan.choices:
        return without_transfers(plan)
    facts = _traced(choices, wanted.verify, on_phase)
    check_plan(facts, plan)
    aim = Aim(conditions=choices.conditions, profile=choices.profile)
    return decide(facts, plan.rules, plan.min_bytes, None, aim)


def _traced(
    choices: _Choices, verify_bits: bool, on_phase: OnPhase, under: Sequence[Choice] = ()
) -> GraphFacts:
    """The graphs of the target, traced on the device by a process of its own."""
    on_phase("tracing")
    with _processes() as processes:
        graph = processes.folder / "traced.graph.json"
        request = TraceRequest(
            spec=choices.target.spec,
            params=choices.target.params,
            device=choices.device,
            compiler=choices.compiler,
            partitioner=choices.partitioner,
            attention=choices.attention,
            graph=graph,
            verify=verify_bits,
            choices=tuple(under),
        )
        processes.answer(request, "trace")
        return load_graph(graph)


def check_can_measure(compiler: Compiler) -> None:
    """Raise ``UsageError`` if ops of the graphs that ``compiler`` takes do not run one by one."""
    if compiler == "inductor":
        raise UsageError(
            "--op-times measured: Inductor fuses the ops of its graphs, so the times of ops that "
            "run one by one are not the step's",
            fix="leave it out: op times are then computed from the GPU's profile (--profile)",
        )


def op_times(
    facts: GraphFacts, *, verify_bits: bool = False, on_phase: OnPhase = _ignore
) -> tuple[dict[str, float], str]:
    """Milliseconds of the ops of ``facts`` by ``costs.op_key``, measured on the device that they
    are for or taken from the cache; and a note on what could not be measured.

    Raises what ``check_can_measure`` does.
    """
    check_can_measure(facts.compiler)
    on_phase("measuring ops")
    with _processes() as processes:
        plan, graph = processes.folder / "timed.plan.yaml", processes.folder / "timed.graph.json"
        write_plan(plan, make_plan(facts))
        write_atomically(graph, save_graph(facts), GRAPH_FILE)
        request = OpTimesRequest(
            plan=plan, graph=graph, device=facts.device, seed=SEED, verify=verify_bits
        )
        answer = processes.answer(request, "op times")
        assert isinstance(answer, Timed)
        return answer.times_ms, answer.note


# --- arms -----------------------------------------------------------------------------------------


def measure(replays: Replays, options: RunOptions, on_phase: OnPhase = _ignore) -> Measurement:
    """One arm without a plan and one for each plan; a control where asked for, or needed.

    Raises what ends an arm without a result: ``PlanError`` if the target changed or a plan is not
    safe to replay, ``DeviceError`` without the device, ``ArmError`` for anything else.
    """
    plan = replays.plan
    first, *others = _arms(replays, options.engine)
    with _processes() as processes:
        results = [_measured(arm, options, processes, on_phase) for arm in (first, *others)]
        repeat = options.repeat or (options.verify and needs_control(results))
        # It would run out of memory again.
        if repeat and results[0].arm.completed:
            control = replace(first, role="control")
            results.append(_measured(control, options, processes, on_phase))
    return Measurement(
        measured=plan.target,
        schema_version=SCHEMA_VERSION,
        device=plan.device,
        machine=results[0].machine,
        digest=plan.digest,
        compiler=plan.compiler,
        partitioner=plan.partitioner,
        attention=plan.attention,
        rules=plan.rules,
        min_bytes=plan.min_bytes,
        budget=plan.budget,
        asked=plan.asked,
        movable_bytes=plan.movable_bytes,
        engine=options.engine,
        arms=tuple(result.arm for result in results),
        verification=verify(results) if options.verify else None,
        notes=tuple(
            dict.fromkeys(
                (*replays.notes, *_notes_on_recomputed(plan), *_notes_on_pins(results, options))
            )
        ),
    )


def _arms(replays: Replays, engine: Engine) -> list[_Arm]:
    """The arms in order, the first of which moves nothing."""
    plans = [_Arm("plan", each) for each in replays.plans]
    nothing = replays.nothing
    if engine == "compiled":
        return [_Arm("no plan", nothing), *plans]
    return [_Arm("no offload", nothing, "hooks"), _Arm("hooks", nothing, "hooks"), *plans]


def _notes_on_recomputed(plan: Plan) -> Iterator[str]:
    if plan.choices:
        size = sum(each.size_bytes for each in plan.recomputed)
        yield (
            f"the backward computes {len(plan.recomputed)} storages of {format_size(size)} again "
            "that it receives without the plan"
        )


def _notes_on_pins(results: Sequence[ArmResult], options: RunOptions) -> Iterator[str]:
    for result in results:
        yield from result.notes
    if any(result.arm.pin == "off" for result in results):
        yield (
            "host memory is pageable (--pin off): every copy goes through a buffer of CUDA's and "
            "holds up the host, at a small part of the rate of pinned memory"
        )


def without_transfers(plan: Plan) -> Plan:
    """``plan`` with everything that it moves kept."""
    kept = (
        msgspec.structs.replace(entry, action="keep") if entry.action == "offload" else entry
        for entry in plan.storages
    )
    time = plan.predicted.time
    predicted = msgspec.structs.replace(
        plan.predicted,
        plan=plan.predicted.no_plan,
        time=time and msgspec.structs.replace(time, step_us=time.no_plan_us),
    )
    return msgspec.structs.replace(
        plan,
        storages=tuple(kept),
        transfers=(),
        moved_bytes=0,
        budget=None,
        asked="",
        predicted=predicted,
    )


def _measured(
    arm: _Arm, options: RunOptions, processes: _Processes, on_phase: OnPhase
) -> ArmResult:
    name = f"plan ({arm.plan.rules})" if arm.role == "plan" else arm.role
    on_phase(f"measuring: {name}")
    path = processes.folder / "arm.plan.yaml"
    write_plan(path, arm.plan)
    request = ArmRequest(
        plan=path,
        device=arm.plan.device,
        steps=options.steps,
        seed=SEED,
        host_budget_bytes=options.host_budget_bytes,
        verify=options.verify,
        pin=options.pin,
        engine=arm.engine,
        enabled=arm.role == "hooks",
    )
    answer = processes.answer(request, name)
    assert isinstance(answer, ArmResult)
    is_plan = arm.role == "plan"
    known = msgspec.structs.replace(
        answer.arm,
        role=arm.role,
        engine=arm.engine,
        rules=arm.plan.rules if is_plan else None,
        planned=planned(arm.plan) if is_plan else None,
        # An arm that ran out of memory has no graphs to predict from; eager training has none.
        expected=answer.arm.expected or (expected(arm.plan) if arm.engine == "compiled" else None),
    )
    return msgspec.structs.replace(answer, arm=known)


# --- processes ------------------------------------------------------------------------------------


class _Processes:
    """Starts one process at a time, and waits for its answer.  Files go through ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def answer(self, request: Request, name: str) -> Answer:
        """What a fresh process answers to ``request``.  A failure is raised as the error it is."""
        asked, answered = self.folder / "request.json", self.folder / "result.json"
        said = self.folder / "said.txt"
        answered.unlink(missing_ok=True)
        write_message(asked, request)
        environment = _environment() | (REPEATABLE_CUBLAS if request.verify else {})
        command = _command(asked, answered)
        with _opened(said) as output, _running(command, environment, output) as process:
            exit_code = process.wait()
        words = said.read_text(errors="replace")
        if not answered.exists():
            raise _died(name, exit_code, words)
        answer = read_answer(answered)
        if isinstance(answer, Failure):
            raise _error(answer, words)
        return answer


@contextmanager
def _processes() -> Iterator[_Processes]:
    with _temporary_folder() as folder:
        yield _Processes(Path(folder))


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="offplan-run-")
    except OSError as error:
        raise OutputError(
            f"cannot make a temporary folder: {error.strerror}",
            fix="TMPDIR names another place for them",
        ) from error


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("wb")
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror}", fix="TMPDIR names another place for it"
        ) from error


def _command(asked: Path, answered: Path) -> list[str]:
    return [sys.executable, "-m", "offplan.replay.arm", str(asked), str(answered)]


@contextmanager
def _running(
    command: list[str], environment: dict[str, str], output: object
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has ended when the context does, however it is left."""
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,  # type: ignore[call-overload]
            stderr=output,
            # Ctrl-C goes to every process of the terminal's group; this one decides for its own.
            start_new_session=True,
        )
    except OSError as error:
        raise ArmError(
            f"no process can be started: {error.strerror}",
            fix="end others, or raise `ulimit -u` or the memory limit of the container or job",
        ) from error
    try:
        yield process
    finally:
        _end(process)


def _environment() -> dict[str, str]:
    """This process's environment, and its import path: the same offplan, the same model file."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt it, and kill it if that takes too long or if the user insists."""
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def _died(name: str, exit_code: int, words: str) -> OffplanError:
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    if exit_code >= 0:
        how = f"ended with exit code {exit_code}"
    else:
        how = f"was ended by {signal.Signals(-exit_code).name}"
    fix = ""
    if exit_code == -signal.SIGKILL:
        fix = "if nobody killed it, the machine ran out of memory: see dmesg"
    last = f": {lines[-1]}" if lines else ""
    return _with_words(ArmError(f"the process of {name!r} {how}{last}", fix=fix), words)


def _error(failure: Failure, words: str) -> OffplanError:
    error = ArmError(failure.what, where=failure.where, fix=failure.fix)
    error.exit_code = failure.exit_code
    return _with_words(error, words)


def _with_words(error: OffplanError, words: str) -> OffplanError:
    """``error``, caused by what the process said, which ``--traceback`` prints."""
    error.__cause__ = RuntimeError(f"in the process that measures:\n{words}")
    return error
