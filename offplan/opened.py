"""A plan file with the graphs that it is for, where these can be had.

1.  A plan names its graphs by digest: those it starts from (``base``: without any plan), and those
    that it has under its choices (``facts``), the same ones if it makes none.
2.  They are looked for in the file that is named; in ``NAME.graph.json`` beside
    ``NAME.plan.yaml``; and among the graphs that earlier commands kept (``offplan.kept``).
3.  What only the base is there for is made from it: exactly, where graphs run op by op; with a
    guessed lowering where a compiler fuses, which a note says.
4.  Graphs of another digest are refused if they were named, and passed over if not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from offplan.costs import DeviceProfile, profile_for
from offplan.errors import FileFormatError, PlanError, UsageError
from offplan.fusion import is_fused
from offplan.graph import GraphFacts, digest, load_graph
from offplan.kept import kept_graph
from offplan.plan import Plan, load_plan
from offplan.relower import relowered

PLAN_SUFFIXES = (".plan.yaml", ".plan.yml", ".yaml", ".yml")
GRAPH_SUFFIX = ".graph.json"


@dataclass(frozen=True)
class Opened:
    """A plan and its graphs (definition 1); both None if they are not there, and ``notes`` say how
    to get them."""

    plan: Plan
    base: GraphFacts | None
    facts: GraphFacts | None
    notes: tuple[str, ...] = ()


def open_plan(path: Path, graph: Path | None = None) -> Opened:
    """Read the plan at ``path``, and find its graphs.

    Raises ``FileFormatError`` for files that are neither, and ``PlanError`` for a ``graph`` that is
    not the plan's.
    """
    plan = load_plan(path)
    base_digest = plan.base_digest or plan.digest
    found = dict(_found(plan, path, graph))
    base, facts = found.get(base_digest), found.get(plan.digest)
    if facts is None and base is not None:
        facts = relowered(base, plan.choices)
        if digest(facts) != plan.digest:
            return Opened(plan, base, None, (_stale(plan),))
        if is_fused(facts):
            guessed = "how the compiler lowers what is computed again is guessed"
            return Opened(plan, base, facts, (guessed,))
    if facts is None:
        return Opened(plan, base, None, (_missing(plan),))
    return Opened(plan, base, facts)


def profile_of(plan: Plan, given: DeviceProfile | None = None) -> DeviceProfile | None:
    """The profile that ``plan`` was made with, by its name, or else that of its GPU."""
    if given is not None or plan.device == "cpu":
        return given
    for name in (plan.predicted.profile, plan.gpu):
        try:
            return profile_for(name)
        except UsageError:
            continue
    return None


def _found(plan: Plan, path: Path, graph: Path | None) -> Iterator[tuple[str, GraphFacts]]:
    """Graphs by digest, of those that the plan names."""
    wanted = (plan.digest, plan.base_digest or plan.digest)
    if graph is not None:
        facts = load_graph(graph)
        if digest(facts) not in wanted:
            raise PlanError(
                f"{graph} has other graphs than {path}: its digest is {digest(facts)[:19]}..., the "
                f"plan's {wanted[1][:19]}...",
                fix=f"write both at once: {_again(plan)}",
            )
        yield digest(facts), facts
        return
    for name in set(wanted):
        kept = kept_graph(name, plan.gpu)
        if kept is not None:
            yield name, kept
    beside = _beside(path)
    if beside is not None and beside.is_file():
        try:
            facts = load_graph(beside)
        except FileFormatError:
            return
        if digest(facts) in wanted:
            yield digest(facts), facts


def _beside(path: Path) -> Path | None:
    for suffix in PLAN_SUFFIXES:
        if path.name.endswith(suffix):
            return path.with_name(path.name.removesuffix(suffix) + GRAPH_SUFFIX)
    return None


def _missing(plan: Plan) -> str:
    return (
        f"the plan's graphs are not here, so that only what the plan says is shown: {_again(plan)}"
    )


def _stale(plan: Plan) -> str:
    return f"this offplan makes other graphs of the plan's choices: {_again(plan)}"


def _again(plan: Plan) -> str:
    params = "".join(f" -p {name}={value}" for name, value in plan.target.params.items())
    return f"offplan analyze {plan.target.spec}{params} --graph FILE{GRAPH_SUFFIX} keeps them"
