"""Broken files: mutations of valid ones, each read as a command reads it, and then used.

1.  A *case* is a valid file of some *kind* with a few mutations: of its structure (a value becomes
    another one, of a wrong type, huge, negative, not a number, or one from elsewhere in the file;
    keys and items go, appear twice, or change places; something is nested deeply), of its text
    (cut off, spliced, another encoding, NUL, tags, anchors and bombs) or of its bytes.
2.  It is *refused* if one of offplan's errors says so, in one short message that a terminal can
    show, and *used* if what was read goes through what commands do with it.  Anything else that is
    raised is a failure, and so are more than ``MOST_CPU_S`` and ``MOST_BYTES`` for one case.
3.  Graphs that are read are planned, and ``check_plan`` has to accept these plans.
"""

from __future__ import annotations

import functools
import gzip
import json
import math
import os
import pickle
import resource
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import msgspec
import yaml
from planned_steps import random_step

from offplan import gate, kept
from offplan.budget import Aim, parse_budget
from offplan.charted import charts_of, opened_of
from offplan.costs import load_profile, op_times_ms
from offplan.diff import diff
from offplan.doors.graph_text import Sizes, read_graph
from offplan.doors.torch_log import read_log
from offplan.dumped import load_dumped
from offplan.errors import BudgetError, OffplanError
from offplan.explain import explain
from offplan.export import export_plan
from offplan.files import KEPT_FILE, dump_yaml, parse_yaml
from offplan.graph import GraphFacts, digest, load_graph, save_graph
from offplan.measured import dump_measurement, load_measurement
from offplan.opened import open_plan
from offplan.plan import Plan, check_plan, dump_plan, load_plan, make_plan
from offplan.report import analyze_report, render_analyze, render_gate
from offplan.report.blocks import join_report, join_text
from offplan.report.ci import Places
from offplan.report.device import render_device
from offplan.report.diff import render_diff
from offplan.report.explain import render_explanation
from offplan.report.page import Page, render_page
from offplan.report.run import render_run, run_report
from offplan.report.snapshot import to_snapshot
from offplan.report.traces import to_trace

MOST_CPU_S = 1.0
MOST_BYTES = 300 * 1024**2
_MOST_WORDS = 2000
_SEEDS = 12

ROOT = Path(__file__).resolve().parent.parent


# --- valid files ----------------------------------------------------------------------------------


@functools.cache
def facts_of(seed: int) -> GraphFacts:
    return random_step(Random(seed), regions=1 + seed % 2)


@functools.cache
def plan_of(seed: int) -> Plan:
    return make_plan(facts_of(seed), budget=(None, 0)[seed % 2], min_bytes=1)


def _log_text(seed: int) -> str:
    """What TORCH_TRACE writes of a small step."""
    rows = 2 + seed
    mm = f"f32[{rows}, 8][8, 1]cpu"
    forward = f'''class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[{rows}, 8][8, 1]cpu", primals_2: "f32[8, 8][8, 1]cpu"):
        # File: /job/model.py:7 in forward, code: h = x @ w
        mm: "{mm}" = torch.ops.aten.mm.default(primals_1, primals_2);  x = None
        cos: "f32[s0, 8][8, 1]cpu" = torch.ops.aten.cos.default(mm)
        return (cos, primals_2, mm)
'''
    backward = f'''class GraphModule(torch.nn.Module):
    def forward(self, primals_2, mm: "{mm}", tangents_1: "{mm}"):
        mul: "{mm}" = torch.ops.aten.mul.Tensor(tangents_1, mm);  tangents_1 = None
        return (None, mul)
'''
    where = {"frame_id": 0, "frame_compile_id": 0, "attempt": 0}
    source = {"describer_id": 0, "id": 0, "source": "L['self']._parameters['w']"}
    tensor = {"id": 0, "describer_id": 0, "storage": 0, "is_parameter": True, "size": [8, 8]}
    symbol = {"symbol": "s0", "val": str(rows)}
    metrics = {"co_filename": "/job/model.py", "co_firstlineno": 3}
    events: list[tuple[dict[str, Any], str]] = [
        ({"artifact": {"name": "torch_version"}}, "2.14.1"),
        ({"describe_storage": {"id": 0, "describer_id": 0, "size": 256}, **where}, ""),
        ({"describe_tensor": tensor, **where}, ""),
        ({"describe_source": source, **where}, ""),
        ({"create_symbol": symbol, **where}, ""),
        ({"dynamo_output_graph": {}, **where}, forward),
        ({"aot_forward_graph": {}, **where}, forward),
        ({"aot_backward_graph": {}, **where}, backward),
        ({"inductor_output_code": {}, **where}, ""),
        ({"compilation_metrics": metrics, **where}, ""),
    ]
    found = ""
    for content, payload in events:
        found += f"V0101 00:00:00.000000 1 torch/x.py:1] {json.dumps(content)}\n"
        found += "".join(f"\t{line}\n" for line in payload.splitlines())
    return found


def _measured_text(seed: int) -> str:
    from test_measured import measurement

    return dump_measurement(measurement()).decode()


@functools.cache
def _snapshot_document(seed: int) -> Any:
    charts = charts_of(opened_of(plan_of(seed), facts_of(seed)))
    return pickle.loads(to_snapshot(charts.last, {}))


@functools.cache
def _profile_text(seed: int) -> str:
    paths = sorted((ROOT / "offplan" / "profiles").glob("*.yaml"))
    return paths[seed % len(paths)].read_text()


_CONFIG = {
    "tool": {
        "offplan": {
            "max-alias-skipped": "0",
            "max-skipped": {"output": "1GiB", "alias": 5},
            "rules": "last-holder",
            "baseline": "main.plan.yaml",
            "max-growth": "5%",
            "max-peak": "80GiB",
        }
    }
}


def _toml(document: Any) -> str:
    """A document of tables and scalars as TOML; other things as TOML would hardly have them."""
    lines: list[str] = []

    def table(name: str, content: dict[Any, Any]) -> None:
        lines.append(f"[{name}]" if name else "")
        inner = [(k, v) for k, v in content.items() if isinstance(v, dict)]
        for key, value in content.items():
            if not isinstance(value, dict):
                lines.append(f"{key} = {json.dumps(value, default=str)}")
        for key, value in inner:
            table(f"{name}.{key}".lstrip("."), value)

    if isinstance(document, dict):
        table("", document)
        return "\n".join(lines)
    return json.dumps(document, default=str)


# --- what is done with them -----------------------------------------------------------------------


class Unsound(AssertionError):
    """What was read cannot be used."""


def use_plan(path: Path) -> None:
    plan = load_plan(path)
    render_analyze(analyze_report(plan), "text")
    thresholds = gate.Thresholds(max_alias_skipped=0, max_peak=1000)
    render_gate(gate.check(plan, thresholds, None, plan), "text", 80, Places())
    render_diff(diff(plan_of(1), plan), "text", 80)
    render_explanation(explain(open_plan(path), "", None, ()), "text", 80)
    export_plan(plan, "json", None)
    render_page(Page(plan=plan))
    if load_plan_again(path, plan) != plan:
        raise Unsound("what is written of the plan is read as another")


def load_plan_again(path: Path, plan: Plan) -> Plan:
    path.write_bytes(dump_plan(plan))
    return load_plan(path)


def use_graph(path: Path) -> None:
    facts = load_graph(path)
    digest(facts)
    for budget in ("0", "none", "floor", "60%"):
        try:
            plan = make_plan(facts, budget=parse_budget(budget), min_bytes=1)
        except BudgetError:
            continue
        try:
            check_plan(facts, plan)
        except OffplanError as error:
            raise Unsound(f"the plan for budget {budget} is refused: {error}") from error
    render_analyze(analyze_report(plan), "markdown")
    render_gate(gate.check(plan, gate.Thresholds(max_alias_skipped=0)), "text", 80, Places())
    opened = opened_of(plan, facts)
    render_explanation(explain(opened, "", None, ()), "text", 80)
    charts = charts_of(opened)
    to_trace(charts.by_name(), {})
    export_plan(plan, "json", facts)
    # The plan's file, and its graphs beside it.
    beside = path.with_name("beside.plan.yaml")
    path.with_name("beside.graph.json").write_bytes(save_graph(facts))
    if load_plan_again(beside, plan) != plan:
        raise Unsound("what is written of the plan is read as another")
    if open_plan(beside).facts != facts:
        raise Unsound("what is written of the graphs is read as others")


def use_profile(path: Path) -> None:
    profile = load_profile(path)
    render_device(profile, "text", 80)
    times = op_times_ms(facts_of(1), profile)
    if not all(math.isfinite(each) and each >= 0 for each in times):
        raise Unsound(f"an op takes {max(times)} ms")
    budget = parse_budget("floor")
    make_plan(facts_of(1), budget=budget, min_bytes=1, aim=Aim(profile=profile))


def use_measured(path: Path) -> None:
    measurement = load_measurement(path)
    for format in ("text", "json"):
        render_run(run_report(measurement), format, 80)
    plan = msgspec.structs.replace(plan_of(1), digest=measurement.digest)
    render_page(Page(plan=plan, measured=measurement))


def use_snapshot(path: Path) -> None:
    dumped = load_dumped(path)
    charts = charts_of(opened_of(plan_of(1), facts_of(1)))
    join_text(join_report(charts.last, dumped), 80)


def use_log(path: Path) -> None:
    log = read_log(str(path))
    for graph in log.chosen(None):
        sizes = Sizes(graph.sizes, graph.compile_id)
        for text in filter(None, (graph.forward, graph.backward)):
            read = read_graph(text, "a graph")
            for annotation in (*(p.annotation for p in read.placeholders),):
                sizes.tensor(annotation)
                sizes.number(annotation)
            for line in read.lines:
                sizes.tensor(line.annotation)


def use_config(path: Path) -> None:
    gate.read_config(path.parent)


def use_kept_graph(path: Path) -> None:
    folder = path.parent
    facts = facts_of(1)
    with mock.patch.dict(os.environ, OFFPLAN_CACHE=str(folder / "cache")):
        made = kept.keep_graph(facts)
        assert made is not None
        made.write_bytes(path.read_bytes())
        found = kept.kept_graph(digest(facts))
        if found is not None and digest(found) != digest(facts):
            raise Unsound("other graphs are taken for those that were kept")
        if found is None and made.exists():
            raise Unsound("a damaged file is kept")


def use_kept_trace(path: Path) -> None:
    key = kept.TraceKey("model.py", {}, {}, {})
    with mock.patch.dict(os.environ, OFFPLAN_CACHE=str(path.parent / "cache")):
        kept.keep_trace(key, facts_of(1), ())
        for made in (path.parent / "cache" / "traces").iterdir():
            made.write_bytes(path.read_bytes())
        kept.kept_trace(key)


# --- kinds ----------------------------------------------------------------------------------------

Dump = Callable[[Any], bytes]


def _json(document: Any) -> bytes:
    return json.dumps(document, default=str).encode()


def _yaml(document: Any) -> bytes:
    return dump_yaml(document).encode("utf-8", "surrogatepass")


def _zipped(document: Any) -> bytes:
    return KEPT_FILE.first_bytes + zlib.compress(_json(document), 1)


@dataclass(frozen=True)
class Kind:
    """Files of one kind: a valid document for each seed, what writes it, and what uses a file."""

    name: str
    document: Callable[[int], Any]
    dump: Dump
    use: Callable[[Path], None]
    suffix: str
    share: int = 1


def _text_of(dump: Callable[[int], str]) -> Callable[[int], Any]:
    return lambda seed: parse_yaml(dump(seed))


def _log_lines(document: Any) -> bytes:
    if not isinstance(document, list):
        return _json(document)
    found = ""
    for item in document:
        if isinstance(item, dict):
            found += f"V0101 00:00:00.000000 1 torch/x.py:1] {json.dumps(item, default=str)}\n"
        else:
            found += "".join(f"\t{line}\n" for line in str(item).splitlines())
    return found.encode("utf-8", "surrogatepass")


def _log_document(seed: int) -> Any:
    found: list[Any] = []
    for line in _log_text(seed).splitlines():
        _, separator, rest = line.partition("] {")
        if separator and not line.startswith("\t"):
            found.append(json.loads("{" + rest))
        elif found and isinstance(found[-1], str):
            found[-1] += "\n" + line[1:]
        else:
            found.append(line[1:])
    return found


KINDS = (
    Kind("plan", lambda s: parse_yaml(dump_plan(plan_of(s)).decode()), _yaml, use_plan, ".yaml", 3),
    Kind(
        "graph", lambda s: json.loads(save_graph(facts_of(s))), _json, use_graph, ".graph.json", 4
    ),
    Kind("profile", _text_of(_profile_text), _yaml, use_profile, ".yaml"),
    Kind("measured", lambda s: json.loads(_measured_text(s)), _json, use_measured, ".json"),
    Kind("snapshot", _snapshot_document, pickle.dumps, use_snapshot, ".pickle"),
    Kind("snapshot in JSON", _snapshot_document, _json, use_snapshot, ".json"),
    Kind("trace log", _log_document, _log_lines, use_log, ".log"),
    Kind("configuration", lambda s: _CONFIG, lambda d: _toml(d).encode(), use_config, ".toml"),
    Kind("kept graph", lambda s: json.loads(save_graph(facts_of(1))), _zipped, use_kept_graph, ""),
    Kind(
        "kept trace",
        lambda s: {"digest": "x", "graph": "y", "files": {}},
        _json,
        use_kept_trace,
        "",
    ),
)
_DRAWN = tuple(kind for kind in KINDS for _ in range(kind.share))


# --- mutations ------------------------------------------------------------------------------------

_NUMBERS = (0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63))
_WORDS = ("", "x", "nan", "inf", "-inf", "1e999", "\x1b[31mred", "a\nb", "\u202e", "é", "null", "0")
_ODD: tuple[Any, ...] = (None, True, False, [], {}, [[]], {"x": 1}, 0.5, -1.5, 1e308, math.nan)


def mutated(document: Any, choice: Random) -> Any:
    """``document`` with one to three changes of structure."""
    document = _copied(document)
    for _ in range(choice.choice((1, 1, 1, 2, 3))):
        document = _changed(document, choice)
    return document


def _copied(item: Any) -> Any:
    if isinstance(item, dict):
        return {key: _copied(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [_copied(value) for value in item]
    return item


def places_of(item: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value of a document is."""
    yield path
    if isinstance(item, dict):
        for key, value in item.items():
            yield from places_of(value, (*path, key))
    elif isinstance(item, list):
        for place, value in enumerate(item):
            yield from places_of(value, (*path, place))


def value_at(item: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        item = item[key]
    return item


def _changed(document: Any, choice: Random) -> Any:
    places = list(places_of(document))
    path = choice.choice(places)
    old = value_at(document, path)
    new = _other(old, document, places, choice)
    if not path:
        return new
    parent, key = value_at(document, path[:-1]), path[-1]
    how = choice.random()
    if how < 0.08:
        del parent[key]
    elif how < 0.16 and isinstance(parent, list):
        parent.insert(choice.randrange(len(parent) + 1), _copied(old))
    elif how < 0.2 and isinstance(parent, list):
        other = choice.randrange(len(parent))
        parent[key], parent[other] = parent[other], parent[key]
    elif how < 0.24 and isinstance(parent, dict):
        parent[choice.choice(_WORDS) or "more"] = new
    else:
        parent[key] = new
    return document


def _other(old: Any, document: Any, places: list[tuple[Any, ...]], choice: Random) -> Any:
    """Another value in place of ``old``."""
    how = choice.random()
    if how < 0.3:
        # One of its own kind from elsewhere.
        some = choice.sample(places, min(20, len(places)))
        found = [value_at(document, p) for p in some if type(value_at(document, p)) is type(old)]
        if found:
            return _copied(choice.choice(found))
    if isinstance(old, int) and not isinstance(old, bool) and how < 0.7:
        return choice.choice((old + 1, old - 1, -old, old * 1000, choice.choice(_NUMBERS)))
    if isinstance(old, str) and how < 0.7:
        return choice.choice((old + "x", old[1:], old * 50, choice.choice(_WORDS)))
    if how < 0.75:
        return _deep(choice.choice((20, 40, 200, 2000)), choice)
    if how < 0.8:
        return choice.choice((10**30, 10**400, -(10**30), "9" * 400, "A" * 5000, [0] * 3000))
    return choice.choice((*_ODD, *_WORDS, *_NUMBERS))


def _deep(levels: int, choice: Random) -> Any:
    found: Any = 0
    for _ in range(levels):
        found = [found] if choice.random() < 0.5 else {"x": found}
    return found


_BOMBS = (
    "a: &a [x, x, x]\nb: &b [*a, *a, *a]\nc: [*b, *b, *b]\n",
    "!!python/object/apply:os.system ['true']\n",
    "x: !!python/object:os.system {}\n",
    "<<: *x\n",
    "--- 1\n--- 2\n",
    "[" * 5000,
    "{a: " * 5000,
    "- " * 5000,
    "? " * 5000,
    "%YAML 9.9\n---\n",
    "a: 1\na: 2\n",
    "\x00\x00\x00",
)


def _broken(content: bytes, choice: Random) -> bytes:
    """``content`` with its bytes changed."""
    place = choice.randrange(len(content) + 1)
    end = min(len(content), place + choice.choice((1, 2, 10, 100, 1000)))
    odd = bytes(choice.randrange(256) for _ in range(choice.choice((1, 1, 2, 8, 64))))
    ways: tuple[Callable[[], bytes], ...] = (
        lambda: content[:place],
        lambda: content[:place] + content[end:],
        lambda: content[:place] + odd + content[place:],
        lambda: content[:place] + odd + content[place + len(odd) :],
        lambda: content[:place] + content[place:end] + content[place:],
        lambda: content.decode("utf-8", "replace").encode("utf-16"),
        lambda: content.decode("utf-8", "replace").encode("utf-32"),
        lambda: b"\xef\xbb\xbf" + content,
        lambda: content[:place] + "é".encode("latin-1") + content[place:],
        lambda: content[:place] + b"\x00" + content[place:],
        lambda: gzip.compress(content),
        lambda: b"\x1f\x8b\x08" + odd,
        lambda: choice.choice(_BOMBS).encode() + content,
        lambda: content + choice.choice(_BOMBS).encode(),
        lambda: content[:place] + choice.choice(_BOMBS).encode() + content[place:],
        lambda: choice.choice(_BOMBS).encode(),
        lambda: content.replace(b"\n", b"\r\n"),
        lambda: content * 2,
        lambda: b"",
        lambda: odd * choice.choice((1, 1000)),
    )
    return choice.choice(ways)()


def drawn_content(kind: Kind, choice: Random) -> bytes:
    document = kind.document(choice.randrange(_SEEDS))
    if choice.random() < 0.75:
        try:
            return kind.dump(mutated(document, choice))
        except (ValueError, TypeError, OverflowError, RecursionError, yaml.YAMLError):
            # It cannot be written down.
            return kind.dump(document)[: choice.randrange(2000)]
    content = kind.dump(document)
    for _ in range(choice.choice((1, 1, 2))):
        content = _broken(content, choice)
    return content


# --- cases ----------------------------------------------------------------------------------------


def case(seed: int, number: int) -> dict[str, Any]:
    """Outcome of file ``number`` of those that ``seed`` stands for; raises what is a failure."""
    choice = Random(f"offplan file {seed} {number}")
    kind = choice.choice(_DRAWN)
    return {"kind": kind.name, "outcome": outcome(kind, drawn_content(kind, choice))}


def outcome(kind: Kind, content: bytes) -> str:
    """What comes of a file with ``content``: it is refused, or used."""
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        name = "pyproject" if kind.name == "configuration" else "made"
        path = Path(folder) / (name + kind.suffix)
        path.write_bytes(content)
        before_bytes, start = _most_bytes(), time.process_time()
        try:
            kind.use(path)
            found = "used"
        except OffplanError as error:
            check_message(error)
            found = "refused"
        spent_s, more_bytes = time.process_time() - start, _most_bytes() - before_bytes
    if spent_s > MOST_CPU_S:
        raise Unsound(f"{found} after {spent_s:.1f} s")
    if more_bytes > MOST_BYTES:
        raise Unsound(f"{found} with {more_bytes:,} more bytes")
    return found


def _most_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def check_message(error: OffplanError) -> None:
    """A message is short, and does nothing to a terminal."""
    said = str(error)
    if not error.what.strip():
        raise Unsound("an error says nothing") from error
    if len(said) > _MOST_WORDS:
        raise Unsound(f"a message of {len(said):,} characters: {said[:80]}") from error
    odd = [char for char in said if not char.isprintable() and char != "\n"]
    if odd:
        raise Unsound(f"a message with {odd[0]!r}: {said[:200]!r}") from error
    if len(said.splitlines()) > 4:
        raise Unsound(f"a message of {len(said.splitlines())} lines") from error
