"""``offplan.analyze``: the plan of a model that a script has at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offplan.budget import Aim, given_budget
from offplan.costs import DeviceProfile, find_profile
from offplan.decide import decide
from offplan.eligibility import DEFAULT_MIN_BYTES, DEFAULT_RULES, RuleSet
from offplan.errors import UsageError
from offplan.graph import Compiler, Partitioner
from offplan.memory import Conditions, Optimizer
from offplan.plan import ACTIONS, Plan, given_actions
from offplan.units import parse_size

if TYPE_CHECKING:
    import torch

    from offplan.target import Target


def analyze(
    target: torch.nn.Module | Target | str | Path,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    params: Mapping[str, Any] | None = None,
    budget: int | str | None = None,
    actions: str | Sequence[str] = ACTIONS,
    compiler: Compiler = "inductor",
    device: str | None = None,
    gpu: str | None = None,
    attention: str | None = None,
    partitioner: Partitioner = "min-cut",
    rules: RuleSet = DEFAULT_RULES,
    min_size: int | str = DEFAULT_MIN_BYTES,
    optimizer: Optimizer = "none",
    accumulate: bool = False,
    profile: str | DeviceProfile | None = None,
    host_budget: int | str | None = None,
) -> Plan:
    """Trace one training step of ``target`` and plan it for ``budget``; no GPU is needed.

    ``target`` is a model, called with ``args`` and ``kwargs`` (its tensors are looked at, not
    read, moved or changed), a ``Target``, or what the command line calls one (``model.py``), with
    its ``params``.  ``loss`` takes what the model returns; without it the loss is that of
    ``Target``.  The rest are the options of ``offplan analyze``: ``budget`` is bytes, ``"80GiB"``,
    ``"80%"``, ``"auto"``, ``"floor"``, 0 for everything, or None to move nothing; ``actions`` are
    those that may be taken, ``"keep"`` among them; ``device`` is ``"cuda"``, unless torch is a CPU
    build.

    Raises ``TargetError`` and ``TraceError`` if it cannot be traced, ``BudgetError`` if no plan is
    within the budget, ``UsageError`` for options that make no sense.
    """
    from offplan.trace.capture import TraceOptions, default_device, traced, traced_target

    allowed = given_actions(actions)
    options = TraceOptions(
        device=device or default_device(),
        gpu=gpu,
        attention=attention,
        partitioner=partitioner,
        compiler=compiler,
    )
    if isinstance(target, str | Path):
        if args or kwargs or loss is not None:
            raise UsageError(
                "args, kwargs and loss belong to a model, not to a target file",
                fix="give params, which its factory takes",
            )
        step = traced(str(target), {k: str(v) for k, v in (params or {}).items()}, options)
    else:
        if params:
            raise UsageError("params belong to a target file; a model takes args and kwargs")
        step = traced_target(_step(target, args, kwargs or {}, loss), options)
    aim = Aim(
        conditions=Conditions(optimizer=optimizer, accumulate=accumulate),
        profile=find_profile(profile) if isinstance(profile, str) else profile,
        host_bytes=parse_size(host_budget) if isinstance(host_budget, str) else host_budget,
        actions=allowed,
    )
    min_bytes = parse_size(min_size) if isinstance(min_size, str) else min_size
    wanted = given_budget(budget)
    return decide(step.facts, rules, min_bytes, wanted, aim, step.under)


def _step(
    target: torch.nn.Module | Target,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
) -> Target:
    from offplan.target import Target, is_model

    if is_model(target):
        return Target(target, args, kwargs, loss)
    if not isinstance(target, Target):
        raise UsageError(
            f"a {type(target).__name__} cannot be analyzed",
            fix="give a torch.nn.Module, an offplan.Target, or the path of a target file",
        )
    if args or kwargs or loss is not None:
        raise UsageError("a Target has its own args, kwargs and loss")
    return target
