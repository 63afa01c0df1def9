"""The pytest plugin: limits on what a model saves and on its peak, as tests.

1.  ``@pytest.mark.offplan(target="model.py", max_peak="20GiB")`` checks the plan of a target when
    the body of the test, which may be empty, has passed.  Options are those of ``offplan.marked``.
    Of several marks (of a class and its method) the closest decides, option by option.
2.  The fixture ``offplan_plan`` is that plan.  ``offplan_check(model, args, max_peak="20GiB")``
    checks a model that the test made, or another target; the marks have what it is not given.
3.  A baseline that is kept with a test is ``__offplan__/<file>.<test>.plan.yaml`` beside the test's
    file.  ``--offplan-update`` writes it instead of comparing with it.

A limit that does not hold fails the test with the gate's report and no traceback.  Every pytest run
imports this module: what it needs is imported when the first test asks for it.

PYTEST_DONT_REWRITE: it asserts nothing, and a run inside a run would warn that it is imported.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from offplan.marked import Asked, Plans
    from offplan.plan import Plan

_Result = TypeVar("_Result")

_MARK = "offplan"
_UPDATE = "--offplan-update"
# How a test's properties name a baseline that it wrote: reports carry them from xdist's workers.
_WROTE = "offplan_baseline"
_UNSAFE = re.compile(r"[^\w.\[\]=,+-]+")
_MAX_NAME = 120


@dataclass(frozen=True)
class _Call:
    """A call of ``offplan_check``, as messages name it."""

    number: int
    what: str
    line: str


_PLANS: pytest.StashKey[Plans] = pytest.StashKey()
_CALLS: pytest.StashKey[tuple[_Call, ...]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("offplan").addoption(
        _UPDATE,
        action="store_true",
        help="write the baselines of tests marked with offplan instead of comparing with them",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "offplan(target, params, budget, max_alias_skipped, max_skipped, max_peak, baseline, "
        "max_growth, rules, ...): check the offplan plan of a training step, when the test has "
        "passed",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # A test may be run again.
    item.stash[_CALLS] = ()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    passed = yield
    if item.get_closest_marker(_MARK) is not None:
        with_messages(lambda: _check_marked(item))
    return passed


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [each for found in terminalreporter.stats.values() for each in found]
    wrote = {
        str(value)
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == _WROTE
    }
    if wrote:
        terminalreporter.section("offplan baselines written")
        for path in sorted(wrote):
            terminalreporter.write_line(path)


# --- fixtures -------------------------------------------------------------------------------------


@pytest.fixture
def offplan_plan(request: pytest.FixtureRequest) -> Plan:
    """The plan of the target that the test's mark names."""
    return with_messages(lambda: _marked_plan(request.node))


@pytest.fixture
def offplan_check(request: pytest.FixtureRequest) -> Callable[..., Plan]:
    """``offplan_check(model, args=(), kwargs=None, *, loss=None, **options)`` returns a plan.

    Fails the test if a limit does not hold.  ``model`` is a ``torch.nn.Module`` and called with
    ``args`` and ``kwargs`` (its tensors are looked at, not changed), an ``offplan.Target``, or what
    the command line calls a target.  The options are those of the mark.
    """

    def offplan_check(
        model: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        loss: Callable[[Any], Any] | None = None,
        **options: object,
    ) -> Plan:
        frame = sys._getframe(1)
        line = f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"

        def run() -> Plan:
            return _check_call(request.node, line, model, (args, kwargs or {}, loss), options)

        return with_messages(run)

    return offplan_check


def with_messages(run: Callable[[], _Result]) -> _Result:
    """What ``run`` returns; fails the test with the message of a deliberate error."""
    from offplan.errors import OffplanError

    try:
        return run()
    except OffplanError as error:
        said = str(error)
    pytest.fail(said, pytrace=False)


# --- checking -------------------------------------------------------------------------------------


def _plans(config: pytest.Config) -> Plans:
    from offplan.marked import Plans

    return config.stash.setdefault(_PLANS, Plans(config.rootpath))


def _asked(item: pytest.Item, options: Mapping[str, object]) -> Asked:
    from offplan.errors import UsageError
    from offplan.marked import asked

    settings: dict[str, object] = {}
    for mark in reversed(list(item.iter_markers(_MARK))):
        if mark.args:
            raise UsageError(
                "the offplan mark takes options by name",
                where=item.nodeid,
                fix='for example: @pytest.mark.offplan(target="model.py", max_peak="20GiB")',
            )
        settings.update(mark.kwargs)
    return asked({**settings, **options}, item.config.rootpath, item.nodeid)


def _marked_plan(item: pytest.Item) -> Plan:
    from offplan.errors import UsageError

    wanted = _asked(item, {})
    if not wanted.target:
        raise UsageError(
            "the test names no target",
            where=item.nodeid,
            fix='add @pytest.mark.offplan(target="model.py"), or check a model that it makes with '
            "the fixture offplan_check",
        )
    return _plans(item.config).plan(wanted)


def _check_marked(item: pytest.Item) -> None:
    wanted = _asked(item, {})
    if not wanted.target and item.stash.get(_CALLS, ()):
        return
    plan = _marked_plan(item)
    if not wanted.nothing:
        _judge(item, plan, wanted, None)


def _check_call(
    item: pytest.Item,
    line: str,
    model: object,
    called: tuple[tuple[Any, ...], Mapping[str, Any], Callable[[Any], Any] | None],
    options: Mapping[str, object],
) -> Plan:
    from offplan.errors import UsageError
    from offplan.marked import model_target

    calls = item.stash.get(_CALLS, ())
    named = isinstance(model, str | Path)
    if "target" in options or (named and called != ((), {}, None)):
        raise UsageError("a target that is named takes params; args, kwargs and loss are a model's")
    what = str(model) if named else type(model).__name__
    call = _Call(len(calls) + 1, what, line)
    item.stash[_CALLS] = (*calls, call)
    wanted = _asked(item, {**options, "target": what})
    if named:
        plan = _plans(item.config).plan(wanted)
    else:
        plan = _plans(item.config).plan_of_model(model_target(model, *called), wanted)
    if not wanted.nothing:
        _judge(item, plan, wanted, call)
    return plan


def _judge(item: pytest.Item, plan: Plan, wanted: Asked, call: _Call | None) -> None:
    """Fail the test if ``plan`` is not as ``wanted``; with ``--offplan-update``, write it first."""
    from offplan.marked import checked, update
    from offplan.report import render_gate

    baseline = wanted.thresholds.baseline
    if wanted.own_baseline:
        baseline = _own_baseline(item, 1 if call is None else call.number)
    if baseline is not None:
        baseline = Path(os.path.relpath(baseline))
        if item.config.getoption(_UPDATE) and update(baseline, plan):
            item.user_properties.append((_WROTE, str(baseline)))
    fix = f'pytest {_UPDATE} "{item.nodeid}" writes it; commit it'
    result = checked(plan, wanted, baseline, fix)
    if result.ok:
        return
    width = item.config.get_terminal_writer().fullwidth
    if call is None:
        pytest.fail(render_gate(result, "text", width), pytrace=False)
    text = render_gate(replace(result, target=call.what), "text", width)
    pytest.fail(f"{text}\n  at: {call.line}", pytrace=False)


def _own_baseline(item: pytest.Item, number: int) -> Path:
    """Definition 3; the second check of a test and those after it are numbered."""
    # Not the node id: xdist appends the group that a test is in.
    names = [node.name for node in item.listchain() if isinstance(node, pytest.Class | pytest.Item)]
    name = ".".join(names)
    safe = _UNSAFE.sub("-", name)[:_MAX_NAME]
    if safe != name:
        safe += "-" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    numbered = safe if number == 1 else f"{safe}.{number}"
    return item.path.parent / "__offplan__" / f"{item.path.stem}.{numbered}.plan.yaml"
