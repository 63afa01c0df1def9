"""What a name given on the command line means in a plan: storages, by any name that people know.

A name is looked for as each of these in turn, and means all that the first one finds:

1.  the number of a storage, as ``#123`` or ``123``;
2.  the name of an op, parameter, buffer or input (``mm_5``, ``layers.0.norm.weight``): storages
    that it makes, or that are saved as what it makes;
3.  a source line, ``model.py:20`` with as much of the path as is needed: the same of its ops, or
    else what these read;
4.  a module path with all below it (``layers.3``), a kind of op (``aten.mm``), or a pattern of
    either or of 2 (``layers.*.mlp``): saved storages, and those that are computed again.  For a
    module that makes none, what its forward reads.

Storages that are not saved are found by 1 to 3, where the plan's graphs are there.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from offplan.errors import OffplanError
from offplan.graph import GraphFacts, Op, StorageId
from offplan.plan import Entry, Plan, Recomputed

_ID = re.compile(r"#?(\d+)", re.ASCII)
_SOURCE = re.compile(r"(.+):(\d+)", re.ASCII)
_CLOSE_COUNT = 5
# How alike a name must be to be offered instead.
_CLOSE = 0.5


@dataclass(frozen=True)
class Subject:
    """A storage of a plan's step: saved by ``region`` (``entry``), computed ``again``, or neither.

    ``storage`` is None for a saved value without one, and for what is computed again where the
    graphs are not there.
    """

    region: int
    storage: StorageId | None
    entry: Entry | None = None
    again: Recomputed | None = None

    @property
    def key(self) -> tuple[int, object, object]:
        """Another for each storage of a region, and for each value that has none."""
        position = self.entry.views[0].position if self.entry is not None else None
        return self.region, self.storage, self.again.name if self.again is not None else position

    @property
    def size_bytes(self) -> int:
        found = self.entry or self.again
        return 0 if found is None else found.size_bytes


@dataclass(frozen=True)
class Site:
    """An op, with what it makes and reads."""

    region: int
    is_forward: bool
    op: Op
    makes: tuple[StorageId, ...]
    reads: tuple[StorageId, ...]


def subjects(plan: Plan, facts: GraphFacts | None) -> tuple[Subject, ...]:
    """All that the plan saves or has computed again."""
    made = {} if facts is None else _made_by(facts)
    saved = (Subject(entry.region, entry.id, entry=entry) for entry in plan.storages)
    again = (
        Subject(each.region, made.get((each.region, each.name, each.op)), again=each)
        for each in plan.recomputed
    )
    return (*saved, *again)


def find(name: str, plan: Plan, facts: GraphFacts | None) -> tuple[Subject, ...]:
    """What ``name`` means in ``plan``, of which ``facts`` are the graphs as planned.

    Raises ``OffplanError`` with the nearest names if it is nothing.
    """
    known = subjects(plan, facts)
    sites = () if facts is None else tuple(_sites(facts))
    looks: tuple[Callable[[], Iterator[Subject]], ...] = (
        lambda: _by_id(name, known, facts),
        lambda: _by_name(name, known, sites, facts),
        lambda: _by_source(name, known, sites),
        lambda: _by_pattern(name, known, sites),
    )
    for look in looks:
        found = tuple({each.key: each for each in look()}.values())
        if found:
            return found
    raise _nothing(name, plan, known, sites)


# --- the ways to look -----------------------------------------------------------------------------


def _by_id(name: str, known: tuple[Subject, ...], facts: GraphFacts | None) -> Iterator[Subject]:
    number = _ID.fullmatch(name)
    if number is None:
        return
    storage = StorageId(int(number[1]))
    yield from _of_storage(known, [(0, storage)], facts)


def _by_name(
    name: str, known: tuple[Subject, ...], sites: tuple[Site, ...], facts: GraphFacts | None
) -> Iterator[Subject]:
    saved = [each for each in known if name in _said(each, "name")]
    yield from saved
    if saved or facts is None:
        return
    made = [
        (site.region, storage) for site in sites if site.op.name == name for storage in site.makes
    ]
    given = [
        (number, facts.values[item.value].storage)
        for number, region in enumerate(facts.regions)
        for item in region.forward.inputs
        if item.name == name
    ]
    found = [*made, *((region, storage) for region, storage in given if storage is not None)]
    yield from _of_storage(known, found, facts)


def _by_source(name: str, known: tuple[Subject, ...], sites: tuple[Site, ...]) -> Iterator[Subject]:
    if _SOURCE.fullmatch(name) is None:
        return
    at_line = [
        each for each in known if any(_is_line(name, line) for line in _said(each, "source"))
    ]
    yield from at_line
    if at_line:
        return
    here = [site for site in sites if _is_line(name, site.op.source)]
    read = {(site.region, storage) for site in here for storage in site.reads}
    yield from (each for each in known if (each.region, each.storage) in read)


def _by_pattern(
    name: str, known: tuple[Subject, ...], sites: tuple[Site, ...]
) -> Iterator[Subject]:
    is_meant = _pattern(name)
    found = [
        each
        for each in known
        if any(map(is_meant, (*_said(each, "module"), *_said(each, "name"), *_said(each, "op"))))
    ]
    yield from found
    if all(each.entry is not None and each.entry.rule == "parameter" for each in found):
        here = [site for site in sites if site.is_forward and is_meant(site.op.module)]
        read = {(site.region, storage) for site in here for storage in site.reads}
        yield from (each for each in known if (each.region, each.storage) in read)


def _pattern(name: str) -> Callable[[str], bool]:
    """Whether a name, or what it is below, is what ``name`` says."""
    if not any(char in name for char in "*?["):
        return lambda text: text == name or text.startswith(f"{name}.")
    matches = re.compile(fnmatch.translate(name)).match
    return lambda text: any(matches(part) for part in _with_parents(text))


def _of_storage(
    known: Iterable[Subject],
    wanted: Iterable[tuple[int, StorageId]],
    facts: GraphFacts | None,
) -> Iterator[Subject]:
    """The subjects that have these storages; of a storage that is not saved, one of its own."""
    by_storage: dict[StorageId | None, list[Subject]] = {}
    for each in known:
        by_storage.setdefault(each.storage, []).append(each)
    for region, storage in wanted:
        if storage in by_storage:
            yield from by_storage[storage]
        elif facts is not None and 0 <= storage < len(facts.storages):
            yield Subject(region, storage)


# --- what things are called -----------------------------------------------------------------------


def _said(each: Subject, what: Literal["name", "module", "op", "source"]) -> Iterator[str]:
    """``what`` of all that is known of it: of what is computed again, the entry and its views."""
    parts = [] if each.again is None else [each.again]
    views = () if each.entry is None else (each.entry, *each.entry.views)
    yield from (getattr(part, what) for part in (*parts, *views))


def _is_line(name: str, source: str) -> bool:
    """Whether ``name`` is ``source``, or the end of its path."""
    return (
        source == name
        or source.endswith(f"/{name}")
        or bool(source and name.endswith(f"/{source}"))
    )


def _with_parents(path: str) -> Iterator[str]:
    """``a.b.c``, ``a.b``, ``a``."""
    while path:
        yield path
        path = path.rpartition(".")[0]


# --- graphs ---------------------------------------------------------------------------------------


def _sites(facts: GraphFacts) -> Iterator[Site]:
    """Ops of all graphs; what a backward receives is called as in its forward."""
    for number, region in enumerate(facts.regions):
        sent = {
            facts.values[item.backward_value].storage: facts.values[item.value].storage
            for item in region.saved
        }
        backward = region.backward.ops if region.backward is not None else ()
        for place, op in enumerate((*region.forward.ops, *backward)):
            read = dict.fromkeys(facts.values[value].storage for value in op.inputs)
            made = dict.fromkeys(facts.values[value].storage for value in op.outputs)
            yield Site(
                number,
                place < len(region.forward.ops),
                op,
                tuple(storage for storage in made if storage is not None),
                tuple(s for storage in read if (s := sent.get(storage, storage)) is not None),
            )


def _made_by(facts: GraphFacts) -> dict[tuple[int, str, str], StorageId]:
    """What each op of the forwards allocates, by region, name and target."""
    found: dict[tuple[int, str, str], StorageId] = {}
    for number, region in enumerate(facts.regions):
        for op in region.forward.ops:
            read = {facts.values[value].storage for value in op.inputs}
            for value in op.outputs:
                storage = facts.values[value].storage
                if storage is not None and storage not in read:
                    found.setdefault((number, op.name, op.target), storage)
    return found


def _nothing(
    name: str, plan: Plan, known: tuple[Subject, ...], sites: tuple[Site, ...]
) -> OffplanError:
    """That ``name`` means nothing, with names that are like it."""
    ids = f"#0 to #{max((entry.id or 0 for entry in plan.storages), default=0)}"
    if _ID.fullmatch(name):
        return OffplanError(
            f"the plan has no storage {name}: what it saves is among {ids}",
            fix="offplan explain PLAN lists the largest",
        )
    names = dict.fromkeys(
        text
        for each in known
        for text in (
            *(part for module in _said(each, "module") for part in _with_parents(module)),
            *_said(each, "name"),
            *_said(each, "op"),
            *_said(each, "source"),
        )
        if text
    )
    names |= dict.fromkeys(site.op.name for site in sites)
    close = difflib.get_close_matches(name, names, n=_CLOSE_COUNT, cutoff=_CLOSE)
    # A path that starts otherwise (model.layers.3 for layers.3) has the same end.
    tails = [path for path in names if path and name.endswith(f".{path}")]
    offered = list(dict.fromkeys((*sorted(tails, key=len, reverse=True)[:2], *close)))
    fix = f"one of: {', '.join(offered)}" if offered else "offplan explain PLAN lists the largest"
    return OffplanError(
        f"nothing that the plan saves or computes again is called {name!r}", fix=fix
    )
