"""Settings that all tests share: fair shares of the cores, and tests that need a GPU."""

from __future__ import annotations

import os

import pytest

pytest_plugins = ["pytester"]

# What commands keep on disk would make one test depend on another.
os.environ["OFFPLAN_CACHE"] = "off"

# Each of several workers would otherwise start a thread per core.  Read when torch is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that need the GPU one after another, on one worker."""
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.xdist_group("cuda"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not item.get_closest_marker("cuda"):
        return
    import torch  # only here: most tests do without it

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
