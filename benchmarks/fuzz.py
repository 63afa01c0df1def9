"""Random programs and broken files, many of them, once.

    python benchmarks/fuzz.py programs --count 20000 --seed 9 --jobs 2
    python benchmarks/fuzz.py files --count 100000 --seed 9
    python benchmarks/fuzz.py programs --seed 9 --only 1234

``programs``: each number of a seed is a program (``tests/fuzz_programs.py``) that runs in every arm
(``tests/fuzz_arms.py``): plain eager, eager under hooks, compiled, and replays at the floor and
under a random plan.  One in fifty goes through ``torch.compile``, the others through a quicker door
into AOTAutograd.

``files``: each number is a mutation of a file that offplan reads (``tests/fuzz_files.py``), which
must be refused with one of offplan's errors, or be read and then used.

Outcomes are kept one by one in ``--state``, from where a run goes on after it was stopped, and are
summed up in ``benchmarks/results/cpu-fuzz.json``; exit code 3 if there was a failure.  ``--only``
runs numbers alone, and writes nothing.
"""

from __future__ import annotations

import argparse
import collections
import fcntl
import gc
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from machine import Results

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

# A process makes this many before another takes its place, so that what leaks does not add up.
CHUNK = {"programs": 250, "files": 5000}
MOST_CPU_S = {"programs": 60, "files": 10}
# One in this many programs is compiled by torch.compile itself.
DYNAMO_EVERY = 50
MOST_LISTED = 50

Case = Callable[[int, int], dict[str, Any]]


# --- one case -------------------------------------------------------------------------------------


def program_case(seed: int, number: int) -> dict[str, Any]:
    from dataclasses import asdict

    from fuzz_arms import outcome, through_dynamo, through_the_quick_door
    from fuzz_programs import numbered

    through = number % DYNAMO_EVERY == 0
    door = through_dynamo if through else through_the_quick_door
    program = numbered(seed, number)
    found = outcome(program, Random(f"offplan plans {seed} {number}"), door)
    return {"door": "dynamo" if through else "quick", **asdict(found)}


def file_case(seed: int, number: int) -> dict[str, Any]:
    from fuzz_files import case

    return case(seed, number)


CASES: dict[str, Case] = {"programs": program_case, "files": file_case}


def prepare(what: str) -> None:
    os.environ["OFFPLAN_CACHE"] = "off"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if what == "programs":
        import torch

        torch.set_num_threads(1)
    gc.collect()
    # What is loaded stays, and need not be looked through again and again.
    gc.freeze()


class TimedOut(BaseException):
    """A case took too long."""


def _time_is_up(signum: int, frame: Any) -> None:
    raise TimedOut


def tried(what: str, seed: int, number: int) -> dict[str, Any]:
    """The outcome of one case; a failure is one, too."""
    start = time.process_time()
    # Of the processor, since others may have it; and as many minutes, for what only waits.
    for name in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(name, _time_is_up)
    signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S[what])
    signal.alarm(60 * MOST_CPU_S[what])
    try:
        found = CASES[what](seed, number)
    except (Exception, TimedOut) as error:
        said = "".join(traceback.format_exception(error))
        found = {"failed": f"{type(error).__name__}: {error}"[:500], "traceback": said[-4000:]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
    return {"number": number, **found, "cpu_s": round(time.process_time() - start, 4)}


def child(options: argparse.Namespace) -> None:
    """Cases of the numbers on stdin, one outcome a line."""
    prepare(options.child)
    for line in sys.stdin:
        print(json.dumps(tried(options.child, options.seed, int(line))), flush=True)
        if int(line) % 20 == 0:
            gc.collect()


# --- many -----------------------------------------------------------------------------------------


class Journal:
    """The outcomes of all cases so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        self.found: dict[int, dict[str, Any]] = {}
        self.heard: set[int] = set()
        if path.exists():
            for line in path.read_text().splitlines():
                # A last line may be cut off.
                if line.endswith("}"):
                    outcome = json.loads(line)
                    self.found[outcome["number"]] = outcome

    def add(self, outcome: dict[str, Any]) -> None:
        with self.lock:
            self.found[outcome["number"]] = outcome
            self.heard.add(outcome["number"])
            with self.path.open("a") as file:
                file.write(json.dumps(outcome) + "\n")


def chunks(numbers: list[int], size: int) -> Iterator[list[int]]:
    for first in range(0, len(numbers), size):
        yield numbers[first : first + size]


def work(what: str, seed: int, left: Iterator[list[int]], journal: Journal) -> None:
    """Run chunks in processes of their own until none is left."""
    words = [sys.executable, __file__, "--child", what, "--seed", str(seed)]
    while (numbers := next_of(left, journal.lock)) is not None:
        waiting = numbers
        while waiting:
            with subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as process:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write("".join(f"{number}\n" for number in waiting))
                process.stdin.close()
                for line in process.stdout:
                    journal.add(json.loads(line))
            waiting = [number for number in waiting if number not in journal.heard]
            if waiting:
                code = process.returncode
                first = {"number": waiting.pop(0), "failed": f"the process ended with {code}"}
                journal.add({**first, "traceback": "", "cpu_s": 0.0})


def next_of(left: Iterator[list[int]], lock: threading.Lock) -> list[int] | None:
    with lock:
        return next(left, None)


def many(options: argparse.Namespace) -> None:
    what, seed = options.what, options.seed
    options.state.mkdir(parents=True, exist_ok=True)
    journal = Journal(options.state / f"{what}-{seed}.jsonl")
    done = {n for n, each in journal.found.items() if not (options.again and "failed" in each)}
    missing = [number for number in range(options.count) if number not in done]
    left = chunks(missing, CHUNK[what])
    threads = [
        threading.Thread(target=work, args=(what, seed, left, journal)) for _ in range(options.jobs)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(timeout=30)
        keep(options, journal)
    found = keep(options, journal)
    print(json.dumps(found[what], indent=2))
    if not found[what]["ok"]:
        raise SystemExit(3)


def keep(options: argparse.Namespace, journal: Journal) -> dict[str, Any]:
    """Write what has been found so far beside what the other kind of run has found."""
    what = options.what
    with journal.lock:
        outcomes = [journal.found[n] for n in sorted(journal.found) if n < options.count]
    results = Results("fuzz", "", "cpu", options.out)
    results.command = "python benchmarks/fuzz.py"
    with (options.state / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = json.loads(results.path.read_text()) if results.path.exists() else {}
        kept = {name: before[name] for name in CASES if name in before}
        kept[what] = summed_up(options, outcomes)
        kept["ok"] = all(kept[name]["ok"] for name in CASES if name in kept)
        results.keep(kept)
    return kept


def summed_up(options: argparse.Namespace, outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    failed = [each for each in outcomes if "failed" in each]
    good = [each for each in outcomes if "failed" not in each]
    of = sum_of_programs if options.what == "programs" else sum_of_files
    command = f"python benchmarks/fuzz.py {options.what} --count {options.count}"
    return {
        "command": f"{command} --seed {options.seed}",
        "ok": not failed and len(outcomes) == options.count,
        "seed": options.seed,
        "count": options.count,
        "done": len(outcomes),
        "failed": len(failed),
        "failures": [
            {"number": each["number"], "failed": each["failed"]} for each in failed[:MOST_LISTED]
        ],
        "cpu_s": round(sum(each["cpu_s"] for each in outcomes), 1),
        "most_cpu_s": max((each["cpu_s"] for each in outcomes), default=0.0),
        **of(good),
    }


def sum_of_programs(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    totals = ("ops", "saved_bytes", "moved", "moved_again", "run_again", "hooked")
    return {
        "doors": dict(collections.Counter(each["door"] for each in outcomes)),
        "compiled_against_eager": dict(
            collections.Counter(each["eager"] for each in outcomes).most_common()
        ),
        "with_transfers_at_the_floor": sum(each["moved"] > 0 for each in outcomes),
        "with_a_choice_of_what_runs_again": sum(each["run_again"] > 0 for each in outcomes),
        "with_several_regions": sum(each["regions"] > 1 for each in outcomes),
        "totals": {name: sum(each[name] for each in outcomes) for name in totals},
        "torch_differs": [each["number"] for each in outcomes if each["eager"] == "torch differs"][
            :MOST_LISTED
        ],
    }


def sum_of_files(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    kinds: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for each in outcomes:
        kinds[each["kind"]][each["outcome"]] += 1
    return {"kinds": {name: dict(found) for name, found in sorted(kinds.items())}}


def alone(options: argparse.Namespace) -> None:
    """Cases of their own, with all that can be said of them."""
    prepare(options.what)
    failed = False
    for number in options.only:
        found = tried(options.what, options.seed, number)
        print(found.pop("traceback", ""), end="")
        print(json.dumps(found, indent=2))
        failed = failed or "failed" in found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{peak:.0f} MiB at most", file=sys.stderr)
    if failed:
        raise SystemExit(3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=CASES, default="programs")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=9)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER")
    parser.add_argument("--again", action="store_true", help="run those that failed once more")
    state = Path(tempfile.gettempdir()) / "offplan-fuzz"
    parser.add_argument("--state", type=Path, default=state, help="where outcomes are kept")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
    elif options.only:
        alone(options)
    else:
        many(options)


if __name__ == "__main__":
    main()
