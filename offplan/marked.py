"""What a test asks of a plan, in the words of ``@pytest.mark.offplan``, and the plans it gets.

1.  The *options* of a mark are those of ``offplan gate``, with underscores: what to trace and how
    (``target``, ``params``, ``device``, ``gpu``, ``attention``, ``compiler``, ``partitioner``,
    ``min_size``), what to plan for (``budget``, ``actions``), and the thresholds.  Nothing is read
    from ``[tool.offplan]``: a test says what it asks.
2.  Paths are relative to ``root``, which is also where a target is traced, so that plans name the
    same files wherever the tests are started.
3.  ``baseline`` is a plan file, or True for one that is kept with the test; ``max_growth`` alone
    means the latter.
4.  A target is traced once for its parameters and options, and planned once for each budget.

A model made in a test is traced each time that it is checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from offplan.budget import Action, Aim, given_budget
from offplan.decide import decide
from offplan.eligibility import DEFAULT_MIN_BYTES, DEFAULT_RULES
from offplan.errors import TargetError, UsageError
from offplan.files import make_folder, read_text
from offplan.gate import SETTINGS, GateResult, Origin, Thresholds, check, thresholds_of
from offplan.graph import Compiler, Partitioner
from offplan.plan import ACTIONS, Plan, dump_plan, given_actions, load_plan, write_plan
from offplan.progress import Progress
from offplan.requests import Request, Step, step_of
from offplan.units import parse_size

if TYPE_CHECKING:
    from offplan.target import Target

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "device": ("cuda", "cpu"),
    "attention": ("flash", "cudnn", "efficient", "math"),
    "compiler": ("aot_eager", "inductor"),
    "partitioner": ("min-cut", "default"),
}
_THRESHOLDS = tuple(setting.replace("-", "_") for setting in SETTINGS)


@dataclass(frozen=True)
class Tracing:
    """How to trace."""

    device: str = "cuda"
    gpu: str | None = None
    attention: str | None = None
    compiler: str = "aot_eager"
    partitioner: str = "min-cut"


@dataclass(frozen=True)
class Planning:
    """What to plan for; sizes are text or bytes."""

    budget: int | str | None = None
    actions: tuple[Action, ...] = ACTIONS
    min_bytes: int = DEFAULT_MIN_BYTES


@dataclass(frozen=True)
class Asked:
    """A mark's options, read.  ``own_baseline``: compare with a plan that is kept with the test."""

    target: str
    params: tuple[tuple[str, str], ...]
    tracing: Tracing
    planning: Planning
    thresholds: Thresholds
    own_baseline: bool

    @property
    def nothing(self) -> bool:
        """Whether there is no threshold, nor a baseline, to check."""
        return not self.own_baseline and replace(self.thresholds, rules=None) == Thresholds()


OPTIONS = (
    "target",
    "params",
    *(field.name for field in fields(Tracing)),
    "budget",
    "actions",
    "min_size",
    *_THRESHOLDS,
)


# --- reading --------------------------------------------------------------------------------------


def asked(settings: Mapping[str, object], root: Path, where: str) -> Asked:
    """The options of a mark on the test ``where``.  Raises ``UsageError`` naming one that is wrong.

    None leaves an option out.
    """
    origin = Origin(where)
    given = {name: value for name, value in settings.items() if value is not None}
    for name in given:
        if name not in OPTIONS:
            raise origin.refusal(name, f"is not an option; known are {', '.join(OPTIONS)}")
    baseline = given.pop("baseline", False)
    limits = {name.replace("_", "-"): given[name] for name in _THRESHOLDS if name in given}
    if not isinstance(baseline, bool):
        limits["baseline"] = str(baseline) if isinstance(baseline, Path) else baseline
    thresholds = thresholds_of(limits, root, origin)
    implied = thresholds.max_growth is not None and thresholds.baseline is None
    return Asked(
        target=_target(given, origin),
        params=_params(given.get("params", {}), origin),
        tracing=_tracing(given, origin),
        planning=_planning(given, origin),
        thresholds=thresholds,
        own_baseline=baseline is True or implied,
    )


def _target(given: Mapping[str, object], origin: Origin) -> str:
    target = given.get("target", "")
    if not isinstance(target, str | Path):
        raise origin.refusal(
            "target", "must name a target; check a model that a test made with offplan_check"
        )
    return str(target)


def _params(value: object, origin: Origin) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, Mapping):
        raise origin.refusal("params", 'must be a dict, such as {"batch": 4}')
    return tuple((str(name), str(each)) for name, each in value.items())


def _tracing(given: Mapping[str, object], origin: Origin) -> Tracing:
    texts: dict[str, str] = {}
    for name in (field.name for field in fields(Tracing) if field.name in given):
        value, choices = given[name], _CHOICES.get(name, ())
        if not isinstance(value, str) or (choices and value not in choices):
            wanted = f"one of {', '.join(choices)}" if choices else "text"
            raise origin.refusal(name, f"must be {wanted}")
        texts[name] = value
    return Tracing(**texts)


def _planning(given: Mapping[str, object], origin: Origin) -> Planning:
    budget, actions = given.get("budget"), given.get("actions", ACTIONS)
    if isinstance(budget, bool) or not isinstance(budget, int | str | None):
        raise origin.refusal("budget", 'must be a size, such as "80GiB", or "80%", "auto", "floor"')
    if not isinstance(actions, str | Sequence):
        raise origin.refusal("actions", 'must be text, such as "keep,offload"')
    size = given.get("min_size", DEFAULT_MIN_BYTES)
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise origin.refusal("min_size", 'must be a size, such as "5MiB"')
    min_bytes = parse_size(size) if isinstance(size, str) else size
    return Planning(budget, given_actions(actions), min_bytes)


# --- plans ----------------------------------------------------------------------------------------


class Plans:
    """The plans of one test process (definition 4)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._steps: dict[object, Step] = {}
        self._plans: dict[object, Plan] = {}

    def plan(self, wanted: Asked) -> Plan:
        """The plan of the target that ``wanted`` names.  Raises what ``offplan analyze`` does."""
        rules = wanted.thresholds.rules
        key = (wanted.target, wanted.params, wanted.tracing, wanted.planning, rules)
        if key not in self._plans:
            try:
                with _inside(self.root):
                    self._plans[key] = self._made(wanted)
            except TargetError as error:
                error.where = error.where or f"{self.root} (pytest's rootdir)"
                raise
        return self._plans[key]

    def plan_of_model(self, target: Target, wanted: Asked) -> Plan:
        """The plan of a model that a test has made."""
        from offplan.trace.capture import TraceOptions, traced_target

        how = wanted.tracing
        options = TraceOptions(
            how.device,
            how.gpu,
            how.attention,
            cast(Partitioner, how.partitioner),
            cast(Compiler, how.compiler),
        )
        with _inside(self.root):
            step = traced_target(target, options)
            return _decided(Step(step.facts, {}, step.under), wanted)

    def _made(self, wanted: Asked) -> Plan:
        if Path(wanted.target).suffix in (".yaml", ".yml"):
            if (wanted.params, wanted.tracing, wanted.planning) != ((), Tracing(), Planning()):
                raise UsageError(
                    f"{wanted.target} is a plan file: it takes no params and no options of traces "
                    "and plans"
                )
            return load_plan(Path(wanted.target))
        key = (wanted.target, wanted.params, wanted.tracing)
        if key not in self._steps:
            self._steps[key] = _traced(wanted)
        return _decided(self._steps[key], wanted)


def _traced(wanted: Asked) -> Step:
    how = wanted.tracing
    request = Request(
        target=wanted.target,
        params=[f"{name}={text}" for name, text in wanted.params],
        device=how.device,
        gpu=how.gpu,
        attention=how.attention,
        compiler=cast(Compiler, how.compiler),
        partitioner=cast(Partitioner, how.partitioner),
    )
    with Progress() as progress:
        return step_of(request, progress)


def _decided(step: Step, wanted: Asked) -> Plan:
    planning = wanted.planning
    return decide(
        step.facts,
        wanted.thresholds.rules or DEFAULT_RULES,
        planning.min_bytes,
        given_budget(planning.budget),
        Aim(actions=planning.actions),
        step.under,
    )


@contextmanager
def _inside(directory: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


# --- checking -------------------------------------------------------------------------------------


def checked(plan: Plan, wanted: Asked, baseline: Path | None, fix: str) -> GateResult:
    """``plan`` against the thresholds, and against the plan in the file ``baseline``, if any.

    Raises ``UsageError`` with ``fix`` if there is no such file, and what ``load_plan`` does.
    """
    thresholds = replace(wanted.thresholds, baseline=baseline)
    if baseline is None:
        return check(plan, thresholds)
    if not baseline.exists():
        raise UsageError(f"there is no baseline {baseline}", fix=fix)
    return check(plan, thresholds, baseline=load_plan(baseline))


def update(baseline: Path, plan: Plan) -> bool:
    """Write ``plan`` to ``baseline``, with its directory; False if it is there already."""
    if baseline.is_file() and read_text(baseline).encode() == dump_plan(plan):
        return False
    make_folder(baseline.parent)
    write_plan(baseline, plan)
    return True


def model_target(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Callable[[Any], Any] | None
) -> Target:
    """A model, or a ``Target``, as a target.  Raises ``UsageError`` for anything else."""
    from offplan.target import Target, is_model

    if isinstance(model, Target):
        return model
    if not is_model(model):
        raise UsageError(
            f"what is checked is a model or a target, not of type {type(model).__name__}",
            fix="give a torch.nn.Module, an offplan.Target, or the name of a target",
        )
    return Target(model, args, kwargs, loss)
