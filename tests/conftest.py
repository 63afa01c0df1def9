"""Settings that all tests share: fair shares of the cores, and tests that need a GPU."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator

import pytest

pytest_plugins = ["pytester"]

# What commands keep on disk would make one test depend on another.
os.environ["OFFPLAN_CACHE"] = "off"

# Each of several workers would otherwise start a thread per core.  Read when torch is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# What is imported for the tests stays; ``pytest_collection_finish`` begins to collect again.
gc.disable()
# Objects made, generations: Dynamo makes millions that reference counts free.
THRESHOLDS = (2000, 20, 50)

# Files whose tests share what takes seconds to make: each file runs on one worker.
TOGETHER = {
    *("test_cli", "test_export", "test_host_life", "test_memory", "test_page"),
    *("test_recompute", "test_recompute_trace", "test_samples", "test_verify"),
}


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Run the tests that need the GPU one after another, on one worker; and see above."""
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.xdist_group("cuda"))
        elif item.path.stem in TOGETHER:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    yield
    for item in items:
        # Where xdist (3.8) writes the group of a test, and pytest (9.2) no longer reads it.
        name = vars(item).get("_nodeid")
        if name is not None and item.nodeid != name:
            item._id = type(item._id).parse(name)  # type: ignore[attr-defined]


def leave_as_it_is() -> None:
    """What is there by now stays: the garbage collector need not go through it each time."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    leave_as_it_is()
    gc.set_threshold(*THRESHOLDS)
    gc.enable()
    guards = sys.modules.get("torch._dynamo.guards")
    if guards is not None:
        # How long the guards of what it compiled take is for its log; it empties the cache of the
        # core for that, which takes longer than to compile something small.
        guards.profile_guard_manager = lambda *args: 0.0  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Torch imports much of itself only when it compiles, and tests keep what they traced.

    Where tests collect garbage by themselves, to see what is freed, that was half of their time.
    """
    begun = time.perf_counter()
    found = yield
    if time.perf_counter() - begun > 1:
        leave_as_it_is()
    return found


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not item.get_closest_marker("cuda"):
        return
    import torch  # only here: most tests do without it

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
