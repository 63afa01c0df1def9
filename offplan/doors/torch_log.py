"""What ``TORCH_TRACE=folder`` wrote: the graphs of a real run, and what their inputs are called.

1.  A log is lines of ``prefix] {json}``, each followed by the lines of its payload, which begin
    with a tab.  Every process writes one, with its rank in the name once that is known.
2.  A *compile id* (``0/1``) is a frame and how often it was compiled before.  Of a frame, the last
    compilation that has a backward is taken: an earlier one was for other shapes.
3.  Dynamo's graph names its inputs by where they come from (``L_self_modules_0_...``); what was
    described under such a source says whether it is a parameter, and which storage it is on.

Nothing in a log is run; this module needs no torch.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offplan.doors import TRACE_LOGS, TRACE_PREFIX
from offplan.doors.graph_text import forward_of
from offplan.errors import FileFormatError, TargetError, UsageError

_RANK_IN_NAME = re.compile(r"rank_(\d+)_")
_MANGLED = re.compile(r"[^a-zA-Z0-9]+")
_REPEATED = re.compile(r"_\d+$")


@dataclass(frozen=True)
class LoggedInput:
    """An input of Dynamo's graph: where it comes from (``L['self']._parameters['w']``), and its
    storage, which has ``storage_bytes`` and an identity within the log."""

    source: str
    is_parameter: bool
    requires_grad: bool
    storage: str
    storage_bytes: int
    offset: int


@dataclass(frozen=True)
class LoggedGraph:
    """One compiled graph: what AOTAutograd printed, and Dynamo's inputs in order (None: unknown).

    ``scope`` is the code that was compiled, in which sources mean the same.  ``sizes`` are the
    values that symbols in the printed text had.
    """

    compile_id: str
    scope: str
    forward: str
    backward: str | None
    inputs: tuple[LoggedInput | None, ...]
    sizes: Mapping[str, int | float]
    by_inductor: bool


@dataclass(frozen=True)
class TraceLog:
    path: Path
    torch: str
    graphs: tuple[LoggedGraph, ...]

    def chosen(self, wanted: str | None) -> tuple[LoggedGraph, ...]:
        """The graphs of a step (definition 2), or those of the compile ids ``wanted``: ``0/0,1/0``.

        Raises ``UsageError`` for an id that is not there, ``TargetError`` if there is no graph.
        """
        if wanted is not None:
            ids = wanted.split(",")
            missing = [name for name in ids if name not in {g.compile_id for g in self.graphs}]
            if missing:
                listed = ", ".join(dict.fromkeys(g.compile_id for g in self.graphs)) or "none"
                raise UsageError(
                    f"-p graphs={wanted}: {self.path} has no graph {missing[0]}",
                    fix=f"its graphs: {listed}",
                )
            return tuple(graph for graph in self.graphs if graph.compile_id in ids)
        last = {_frame(g): g.compile_id for g in self.graphs if g.backward is not None}
        found = [g for g in self.graphs if last.get(_frame(g)) == g.compile_id]
        if not found:
            what = "graphs of no training step: none has a backward" if self.graphs else "no graphs"
            raise TargetError(
                f"{self.path} has {what}",
                fix="trace a process that trains a model under torch.compile: "
                "TORCH_TRACE=folder python train.py",
            )
        return tuple(found)


def _frame(graph: LoggedGraph) -> str:
    return graph.compile_id.partition("/")[0]


def read_log(target: str, rank: int | None = None) -> TraceLog:
    """The log that ``target`` names: a file, or the one of ``rank`` (0 if not given) in a folder.

    Raises ``TargetError`` if there is none, or more than one; ``FileFormatError`` for a file that
    is no such log.
    """
    path = _log_of(Path(target.removeprefix(TRACE_PREFIX)), rank)
    reader = _Reader(path)
    try:
        for event, payload in _events(path):
            reader.take(event, payload)
    except OSError as error:
        raise TargetError(f"{path} cannot be read: {error.strerror}") from error
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        # Damaged, or by a version of torch that writes other events.
        raise FileFormatError(
            f"{path} has an event that cannot be read ({type(error).__name__}: {error})",
            fix="write it again with: TORCH_TRACE=folder python train.py",
        ) from error
    if not reader.count:
        raise FileFormatError(
            f"{path} is no log of torch.compile",
            fix="write one with: TORCH_TRACE=folder python train.py",
        )
    return TraceLog(path, reader.torch, tuple(reader.graphs()))


def _log_of(path: Path, rank: int | None) -> Path:
    if path.is_file():
        if rank is not None:
            raise UsageError(f"-p rank={rank}: {path} is the log of one process")
        return path
    if not path.is_dir():
        raise TargetError(f"there is no file or folder {path}")
    logs = sorted(path.glob(TRACE_LOGS))
    if not logs:
        raise TargetError(
            f"{path} has no {TRACE_LOGS}",
            fix=f"write it with: TORCH_TRACE={path} python train.py",
        )
    ranked = {log: _RANK_IN_NAME.search(log.name) for log in logs}
    if any(ranked.values()):
        wanted = rank or 0
        of_rank = [log for log, found in ranked.items() if found and int(found[1]) == wanted]
        if not of_rank:
            there = sorted({int(found[1]) for found in ranked.values() if found})
            raise UsageError(f"{path} has no log of rank {wanted}", fix=f"its ranks: {there}")
        return _only(of_rank, path, f" of rank {wanted}")
    if rank:
        raise UsageError(f"-p rank={rank}: the logs in {path} name no ranks")
    # Workers that compile kernels write logs without a graph.
    with_graphs = [log for log in logs if len(logs) == 1 or b'"aot_' in log.read_bytes()]
    return _only(with_graphs or logs[:1], path, "")


def _only(logs: list[Path], folder: Path, which: str) -> Path:
    if len(logs) > 1:
        raise TargetError(
            f"{folder} has {len(logs)} logs{which}, of several processes or runs",
            fix="name one of them: " + ", ".join(str(log) for log in logs[:4]),
        )
    return logs[0]


def _events(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Every event with its payload (definition 1)."""
    event: dict[str, Any] | None = None
    payload: list[str] = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("\t"):
                payload.append(line[1:])
                continue
            if event is not None:
                yield event, "".join(payload)
            event, payload = _event(line), []
    if event is not None:
        yield event, "".join(payload)


def _event(line: str) -> dict[str, Any] | None:
    _, separator, text = line.partition("] {")
    if not separator:
        return None
    try:
        found = json.loads("{" + text)
    except (ValueError, RecursionError):
        # The last line of a process that was ended.
        return None
    return found if isinstance(found, dict) else None


@dataclass
class _Compilation:
    """What was logged under one compile id."""

    compile_id: str
    inputs: tuple[str, ...] = ()
    forwards: list[str] = field(default_factory=list)
    backwards: dict[int, str] = field(default_factory=dict)
    described: dict[str, LoggedInput] = field(default_factory=dict)
    sizes: dict[str, int | float] = field(default_factory=dict)
    scope: str = ""
    by_inductor: bool = False


class _Reader:
    """Collects events by compile id."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torch = ""
        self.count = 0
        self.compilations: dict[str, _Compilation] = {}
        self.tensors: dict[str, dict[str, Any]] = {}
        self.storages: dict[str, int] = {}

    def take(self, event: dict[str, Any], payload: str) -> None:
        self.count += 1
        if event.get("artifact", {}).get("name") == "torch_version":
            self.torch = _version(payload)
        for name in ("describe_storage", "describe_tensor", "describe_source"):
            if name in event:
                getattr(self, f"_{name}")(event[name], event)
        if "frame_id" not in event:
            return
        found = self._compilation(event)
        if "create_symbol" in event:
            self._symbol(found, event["create_symbol"])
        if "dynamo_output_graph" in event:
            # A graph that an earlier attempt made never ran.
            found.inputs, found.forwards = _argument_names(payload), []
        if "aot_forward_graph" in event or "aot_inference_graph" in event:
            found.forwards.append(payload)
        if "aot_backward_graph" in event:
            found.backwards[len(found.forwards) - 1] = payload
        if "inductor_output_code" in event:
            found.by_inductor = True
        if "compilation_metrics" in event:
            metrics = event["compilation_metrics"]
            found.scope = f"{metrics.get('co_filename')}:{metrics.get('co_firstlineno')}"

    def _compilation(self, event: dict[str, Any]) -> _Compilation:
        compile_id = f"{event['frame_id']}/{event.get('frame_compile_id', 0)}"
        return self.compilations.setdefault(compile_id, _Compilation(compile_id))

    def _describe_storage(self, storage: dict[str, Any], _: dict[str, Any]) -> None:
        self.storages[f"{storage['describer_id']}.{storage['id']}"] = int(storage.get("size", 0))

    def _describe_tensor(self, tensor: dict[str, Any], _: dict[str, Any]) -> None:
        self.tensors[f"{tensor['describer_id']}.{tensor['id']}"] = tensor

    def _describe_source(self, described: dict[str, Any], event: dict[str, Any]) -> None:
        tensor = self.tensors.get(f"{described['describer_id']}.{described['id']}")
        if tensor is None or "frame_id" not in event:
            return
        storage = f"{described['describer_id']}.{tensor.get('storage')}"
        offset = tensor.get("storage_offset", 0)
        self._compilation(event).described[_MANGLED.sub("_", described["source"])] = LoggedInput(
            source=str(described["source"]),
            is_parameter=bool(tensor.get("is_parameter", False)),
            requires_grad=bool(tensor.get("requires_grad", False)),
            storage=storage,
            storage_bytes=self.storages.get(storage, 0),
            offset=offset if isinstance(offset, int) else 0,
        )

    def _symbol(self, found: _Compilation, symbol: dict[str, Any]) -> None:
        try:
            value = ast.literal_eval(str(symbol.get("val")))
        except (ValueError, SyntaxError):
            return
        if isinstance(value, int | float):
            found.sizes[str(symbol["symbol"])] = value

    def graphs(self) -> Iterator[LoggedGraph]:
        for found in self.compilations.values():
            # Split up (for DDP), a graph's parts do not take Dynamo's inputs in order.
            names = found.inputs if len(found.forwards) == 1 else ()
            for place, forward in enumerate(found.forwards):
                yield LoggedGraph(
                    compile_id=found.compile_id,
                    scope=found.scope,
                    forward=forward,
                    backward=found.backwards.get(place),
                    inputs=tuple(_described(found, name) for name in names),
                    sizes=found.sizes,
                    by_inductor=found.by_inductor,
                )


def _version(payload: str) -> str:
    found = re.search(r"\d+\.\d+\.\d+\w*", payload)
    return found[0] if found else ""


def _described(found: _Compilation, name: str) -> LoggedInput | None:
    return found.described.get(name) or found.described.get(_REPEATED.sub("", name))


def _argument_names(text: str) -> tuple[str, ...]:
    """What the outermost ``forward`` of a printed module takes."""
    try:
        forward = forward_of(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    return () if forward is None else tuple(argument.arg for argument in forward.args.args[1:])
