"""Every write of every command fails in turn: one message, the older file as it was, nothing else.

Writers go through ``offplan.files``; what cannot be kept for the next time is no failure.
"""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from drawn_steps import layered, planned
from fault_points import FILE_OWNERS, HOWS, Fault, Faults, How, points
from fault_points import Point as FilePoint
from test_measured import measurement, no_plan, plan
from typer.testing import CliRunner

from offplan import kept
from offplan.cli import app
from offplan.errors import OffplanError, OutputError
from offplan.files import GRAPH_FILE, PLAN_FILE, make_folder, write_atomically
from offplan.graph import save_graph
from offplan.marked import update
from offplan.plan import load_plan, write_plan
from offplan.replay.messages import Failure, write_message
from offplan.sweep import Axis, Point, Sweep

ROOT = Path(__file__).resolve().parent.parent
# Each with the reason why nothing is left behind there, or why it is no failure.
ELSEWHERE = {
    "offplan.commands.gate:_add_step_summary: Path(name).open": "a note, and no failure",
    "offplan.commands.gate:_add_step_summary: file.write": "a note, and no failure",
    "offplan.files:write_atomically: target.write_bytes": "a device or pipe is written as it is",
    "offplan.files:_replace: temporary.unlink": "only another failure leads to it",
    "offplan.files:_replace: temporary.chmod": "only where there is a file already",
    "offplan.kept:_graph: path.unlink": "a damaged file of the cache may stay",
    "offplan.kept:_make_room: path.unlink": "a file of the cache may stay",
    "offplan.kept:_read: os.utime": "a file of the cache then counts as not there",
    "offplan.options:_less_said: open": "the null device",
    "offplan.program:_quiet_solver: open": "the null device",
    "offplan.program:_quiet_solver: sys.stdout.flush": "stdout",
    "offplan.replay.measure:_Processes.answer: answered.unlink": "in a folder that goes",
    "offplan.replay.measure:_opened: path.open": "in a folder that goes",
    "offplan.replay.measure:_temporary_folder: tempfile.TemporaryDirectory": "goes by itself",
    "offplan.report.traces:zipped: file.write": "into memory",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands run: a graph file, and a plan of it that moves something."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    facts = layered(3)
    Path("step.graph.json").write_bytes(save_graph(facts))
    write_plan(Path("step.plan.yaml"), planned(facts))
    return tmp_path


def offplan(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, list(words))
    return found.exit_code, found.stderr


Write = Callable[[str], tuple[int, str]]


def by_command(*words: str) -> Write:
    """``FILE`` in ``words`` is what is written."""
    return lambda name: offplan(*(word.replace("FILE", name) for word in words))


def by_call(call: Callable[[Path], object]) -> Write:
    def write(name: str) -> tuple[int, str]:
        try:
            call(Path(name))
        except OffplanError as error:
            return error.exit_code, f"error: {error}"
        return 0, ""

    return write


def swept(name: str) -> tuple[int, str]:
    point = Point({"batch": "1"}, "predicted", no_plan_bytes=1)
    found = Sweep("model.py", (Axis("batch", ("1",)),), "", (point,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offplan.commands.sweep._swept", lambda *_: found)
        return offplan("sweep", "model.py", "-p", "batch=1,2", "-o", name)


def replayed(name: str) -> tuple[int, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offplan.replay.measure.plans_to_replay", lambda *_: ())
        patch.setattr("offplan.replay.measure.measure", lambda *_: measurement(no_plan(), plan()))
        return offplan("run", "step.plan.yaml", "-o", name)


GRAPH = ("--graph", "step.graph.json")
WRITERS: dict[str, tuple[str, Write]] = {
    "analyze": ("new.plan.yaml", by_command("analyze", "step.graph.json", "-o", "FILE")),
    "analyze --graph": (
        "new.graph.json",
        by_call(lambda path: write_atomically(path, save_graph(layered(2)), GRAPH_FILE)),
    ),
    "report": ("new.html", by_command("report", "step.plan.yaml", *GRAPH, "-o", "FILE")),
    **{
        f"export --to {to}": (
            f"new.{to}",
            by_command("export", "step.plan.yaml", "--to", to, *more, "-o", "FILE"),
        )
        for to, more in {
            "json": (),
            "must-cpu-offload": (),
            "saved-for-offloading": (),
            "svg": GRAPH,
            "png": GRAPH,
            "perfetto": GRAPH,
            "memory-snapshot": GRAPH,
        }.items()
    },
    **{
        f"gate --report {format}": (
            f"new.{format}",
            by_command(
                "gate", "step.plan.yaml", "--max-alias-skipped", "0", "--report", f"{format}=FILE"
            ),
        )
        for format in ("junit", "json", "sarif")
    },
    "sweep": ("new.json", swept),
    "run": ("new.json", replayed),
    "device": ("new.yaml", by_command("device", "h100", "-o", "FILE")),
    "a baseline": (
        "new.plan.yaml",
        by_call(lambda path: update(path, load_plan(Path("step.plan.yaml")))),
    ),
    "a message": (
        "new.json",
        by_call(lambda path: write_message(path, Failure(exit_code=1, what="nothing"))),
    ),
}


def reached(write: Write, name: str) -> Counter[FilePoint]:
    faults = Faults(FILE_OWNERS)
    with faults.watching() as counts:
        assert write(name)[0] == 0, write(name)
    return +counts


def test_every_write_is_reached_by_some_command(folder: Path) -> None:
    met: set[FilePoint] = set()
    for name, write in WRITERS.values():
        met |= reached(write, name).keys()
        Path(name).unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFPLAN_CACHE", str(folder / "kept"))
        met |= reached(by_call(lambda _: kept.keep_graph(layered(3))), "").keys()
    not_met = {str(point) for point in points() if point.kind == "file"} - set(map(str, met))
    assert not_met == set(ELSEWHERE)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_command_whose_disk_is_full_leaves_what_was_there(folder: Path, writer: str) -> None:
    name, write = WRITERS[writer]
    (point,) = (point for point in reached(write, name) if point.name == "fsync")
    content = Path(name).read_bytes()
    Path(name).write_bytes(content + b" ")
    assert _with(Fault(point, 1, "fails"), write, name, content + b" ") == []
    assert write(name)[0] == 0
    assert Path(name).read_bytes() == content


# The others do the same, in more time.
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("writer", ["device", "a baseline", "analyze --graph"])
def test_a_write_that_fails_leaves_what_was_there(
    folder: Path, writer: str, older: bool, how: How
) -> None:
    name, write = WRITERS[writer]
    counts = reached(write, name)
    content = Path(name).read_bytes()
    before = content + b" " if older else None
    complaints = []
    for point, count in counts.items():
        for number in range(1, count + 1):
            Path(name).unlink(missing_ok=True)
            if before is not None:
                Path(name).write_bytes(before)
            wrong = _with(Fault(point, number, how), write, name, before)
            if write(name)[0] != 0 or Path(name).read_bytes() != content:
                wrong.append("the next time fails too")
            complaints += [f"{point} {number}: {each}" for each in wrong]
    assert counts
    assert complaints == []


def _with(fault: Fault, write: Write, name: str, before: bytes | None) -> list[str]:
    """What is wrong after ``fault``."""
    faults, listed = Faults(FILE_OWNERS), set(Path().iterdir())
    try:
        with faults.watching(fault):
            code, said = write(name)
    except KeyboardInterrupt:
        code, said = 130, "error: interrupted"
    wrong = []
    if code != (1 if fault.how == "fails" else 130):
        wrong.append(f"exit code {code}")
    if not said.splitlines()[-1:] or said.count("error: ") != 1 or "offplan failed" in said:
        wrong.append(f"says {said!r}")
    is_named = name in said or (fault.point.name == "mkdir" and "the directory" in said)
    if fault.how == "fails" and not (is_named and "No space left on device" in said):
        wrong.append(f"says {said!r}")
    now = Path(name).read_bytes() if Path(name).exists() else None
    is_done = fault.how == "interrupted after" and fault.point.name == "replace"
    if now != before and not is_done:
        wrong.append("the file is another")
    if set(Path().iterdir()) - listed - {Path(name)}:
        wrong.append("something is left beside it")
    return wrong


class FullAtTheEnd(io.BytesIO):
    """As of a file system that says when a file is closed that it had no room."""

    def fileno(self) -> int:
        return os.open(os.devnull, os.O_RDONLY)

    def __exit__(self, *error: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def test_a_file_that_is_full_when_it_is_closed_is_not_put_in_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, opened = Path("step.plan.yaml").read_bytes(), Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, mode: FullAtTheEnd() if "x" in mode else opened(path, mode)
    )
    with pytest.raises(OutputError, match="quota"):
        write_atomically(Path("step.plan.yaml"), PLAN_FILE.first_bytes, PLAN_FILE)
    assert Path("step.plan.yaml").read_bytes() == before


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_settle_a_file_has_it_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refused)
    write_atomically(Path("new"), b"# offplan plan", PLAN_FILE)
    assert Path("new").read_bytes() == b"# offplan plan"


# --- other refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", WRITERS)
def test_a_directory_is_not_written_over(folder: Path, writer: str) -> None:
    name, write = WRITERS[writer]
    Path(name).mkdir()
    code, said = write(name)
    assert code == 1
    assert f"{name}" in said
    assert list(Path(name).iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(folder: Path) -> None:
    Path("file").touch()
    with pytest.raises(OutputError, match="cannot make the directory file/below"):
        make_folder(Path("file/below"))


@pytest.mark.parametrize("what", ["a file", "full"])
def test_a_cache_that_cannot_be_written_is_no_failure_and_is_said_where_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    Path("place").touch()
    place = folder / ("place" if what == "a file" else "kept")
    monkeypatch.setenv("OFFPLAN_CACHE", str(place))
    faults = Faults(FILE_OWNERS)
    counts = reached(by_call(lambda _: kept.keep_graph(layered(3))), "") if what == "full" else {}
    for fault in [Fault(point, 1, "fails") for point in counts] or [None]:
        with faults.watching(fault):
            assert kept.keep_graph(layered(2 + (fault is None))) is None
    assert offplan("analyze", "step.graph.json", "-o", "new.plan.yaml")[0] == 0


def test_a_result_that_stdout_has_no_room_for_is_one_message(folder: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "offplan", "export", "step.plan.yaml", "--to", "json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "error: cannot write the result: No space left on device\n"


# --- signals --------------------------------------------------------------------------------------

ENDED = """
import os, signal, sys, time
from offplan.__main__ import main

number = getattr(signal, sys.argv.pop())

def asked(descriptor):
    os.kill(os.getpid(), number)
    time.sleep(60)

os.fsync = asked
main()
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_a_command_that_is_ended_while_it_writes_leaves_what_was_there(
    folder: Path, name: str, code: int
) -> None:
    before, listed = Path("step.plan.yaml").read_bytes(), set(folder.iterdir())
    words = ["analyze", "step.graph.json", "-o", "step.plan.yaml", "-q", name]
    done = subprocess.run(
        [sys.executable, "-c", ENDED, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    said = "interrupted" if name == "SIGINT" else f"ended by {name}"
    assert (done.returncode, done.stderr) == (code, f"error: {said}\n")
    assert Path("step.plan.yaml").read_bytes() == before
    assert set(folder.iterdir()) == listed


def test_a_signal_that_was_ignored_stays_ignored(folder: Path) -> None:
    program = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        "from offplan.ended import end_when_asked; end_when_asked(); "
        "assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN"
    )
    subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True
    )


# --- processes ------------------------------------------------------------------------------------


def test_a_process_or_folder_that_cannot_be_had_is_one_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refused)
    code, said = offplan("run", "step.plan.yaml")
    assert (code, said.splitlines()[0]) == (
        1,
        "error: no process can be started: Resource temporarily unavailable",
    )
    monkeypatch.setattr(tempfile, "TemporaryDirectory", refused)
    code, said = offplan("run", "step.plan.yaml")
    assert (code, said.splitlines()[0]) == (
        1,
        "error: cannot make a temporary folder: Resource temporarily unavailable",
    )
