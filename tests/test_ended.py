"""Ctrl-C, SIGTERM and SIGHUP end a command with one message, wherever it is, and its workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from test_run_cli import wait_for

ROOT = Path(__file__).parents[1]

COMMAND = """
import os, signal, sys, weakref
from offplan.__main__ import end_when_asked
end_when_asked()
import typer
from offplan.options import reports_errors
from offplan.progress import Progress

def asked():
    os.kill(os.getpid(), signal.{name})

class Thing: pass

@reports_errors
def command():
{body}
    print("went on")
app = typer.Typer()
app.command()(command)
app()
"""


def ended(body: str, name: str = "SIGINT") -> tuple[int, str, str]:
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    done = run_code(COMMAND.format(name=name, body=lines))
    return done.returncode, done.stdout, done.stderr


def run_code(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("SIGINT", 130, "error: interrupted\n"),
        ("SIGTERM", 143, "error: ended by SIGTERM\n"),
        ("SIGHUP", 129, "error: ended by SIGHUP\n"),
    ],
)
def test_a_signal_is_one_message_and_its_own_exit_code(name, code, message):
    assert ended("asked()", name) == (code, "", message)


def test_one_that_was_caught_ends_the_command_when_its_next_phase_begins():
    body = """
try:
    asked()
except:
    pass
Progress().phase("next")
"""
    assert ended(body) == (130, "", "error: interrupted\n")


@pytest.mark.parametrize(
    "lost",
    [
        "kept = weakref.ref(thing, lambda gone: asked())\ndel thing",
        "thing.own = type('Own', (), {'__del__': lambda own: asked()})()\ndel thing",
    ],
    ids=["weak-reference", "destructor"],
)
def test_one_that_came_where_python_ignores_errors_comes_again(lost):
    body = f"import time\nthing = Thing()\n{lost}\ntime.sleep(60)"
    assert ended(body) == (130, "", "error: interrupted\n")


def test_one_that_comes_twice_at_once_is_said_once():
    """As ``timeout`` sends it, here while the first is being said."""
    body = """
import offplan.options
fail = offplan.options._fail
offplan.options._fail = lambda *words: (asked(), fail(*words))
asked()
"""
    assert ended(body, "SIGTERM") == (143, "", "error: ended by SIGTERM\n")


def test_an_error_of_a_destructor_is_still_said():
    body = "thing = Thing()\nkept = weakref.ref(thing, lambda gone: 1 / 0)\ndel thing"
    code, output, errors = ended(body)
    assert (code, output) == (0, "went on\n")
    assert "ZeroDivisionError" in errors


def test_the_exit_code_holds_where_code_from_a_string_was_interrupted():
    # Python would end by the signal itself: it remembers such an interrupt though it was caught.
    body = "exec('asked()', globals())"
    assert ended(body) == (130, "", "error: interrupted\n")


def test_one_that_comes_while_the_command_line_loads_waits_for_the_command():
    code = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *rest):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from offplan.__main__ import main
main()
"""
    done = run_code(code, "gate", "there-is-none.plan.yaml")
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "error: interrupted\n"


# --- workers --------------------------------------------------------------------------------------

SWEEP = [
    "sweep",
    "sample_graphs/tiny_gpt.py",
    "-p",
    "batch=1..64",
    "--device",
    "cpu",
    "--jobs",
    "2",
]
VERIFY = ["verify", "--device", "cpu", "--jobs", "2"]


def worker_pids(pid: int) -> list[int]:
    """The worker processes of a command; a copy that is about to become something else is none."""
    found: list[int] = []
    # A child is the thread's that started it.
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, children.read_text().split())
    return [child for child in found if is_worker(child)]


def is_worker(pid: int) -> bool:
    try:
        return b"multiprocessing.spawn" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def working():
    """A command with workers, started as a terminal does it: as a group of its own."""
    started = []

    def start(words: list[str]) -> tuple[subprocess.Popen[str], list[int]]:
        process = subprocess.Popen(
            [sys.executable, "-m", "offplan", *words],
            cwd=ROOT,
            env={**os.environ, "OFFPLAN_CACHE": "off"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        found: list[int] = []

        def is_there() -> bool:
            found[:] = worker_pids(process.pid)
            return bool(found) or process.poll() is not None

        assert wait_for(is_there)
        assert found, process.communicate()
        return process, found

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("words", "delay_s"),
    [(SWEEP, 0.0), (SWEEP, 4.0), (VERIFY, 0.0)],
    ids=["sweep-starting", "sweep-working", "verify-starting"],
)
def test_ctrl_c_in_a_terminal_ends_a_command_and_its_workers(working, words, delay_s):
    process, workers = working(words)
    time.sleep(delay_s)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "")
    # What was done is said before it.  No traceback of a worker, nothing reported as lost.
    assert errors.splitlines()[-1] == "error: interrupted"
    assert all("done: the same command goes on" in line for line in errors.splitlines()[:-1])
    assert not any(map(is_worker, workers))


def test_workers_end_when_their_command_is_killed(working):
    process, workers = working(SWEEP)
    process.kill()
    assert wait_for(lambda: not any(map(is_worker, workers)))
