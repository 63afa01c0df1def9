"""What ``benchmarks/kernels.py`` makes of what a GPU did."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import kernels

COMPUTE, OUT = 7, 13
NAMES = ["nvjet_a", "triton_poi_b", "Memcpy DtoH (Device -> Pinned)", "x_sdpa_y", "Memset"]


def a_file(folder: Path, step_ms: float = 1.0) -> Path:
    """Two steps of an arm, of a product, a copy beside it, a gap and a kernel; and two beside."""
    done = []
    for number in range(4):
        at = 10_000.0 * number
        done += [(0, COMPUTE, at, 100.0), (1, COMPUTE, at + 150.0 + 10 * (number % 2), 20.0)]
        if number % 2 == 0:
            done += [(2, OUT, at + 20.0, 500.0)]
        else:
            done += [(3, COMPUTE, at + 100.0, 30.0), (4, COMPUTE, at + 180.0, 1.0)]
    steps = [
        ("80%" if number % 2 == 0 else "no plan", 10_000_000 * number, step_ms + number, at_end)
        for number, at_end in enumerate(range(9_000_000, 40_000_000, 10_000_000))
    ]
    path = folder / "a-model-2-80-123.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"machine": {"gpu": "G"}, "steps": steps, "names": NAMES, "done": done}, file)
    return path


def test_an_arm_is_busy_idle_and_copies_beside_a_step_without_a_plan(tmp_path: Path) -> None:
    found = kernels.of_arm(a_file(tmp_path))
    assert (found["model"], found["arm"], found["is_beside_itself"]) == ("a-model-2", "80%", False)
    its, beside = found["its"], found["beside"]
    # The medians of the first and third step, and of the others.
    assert (its["step_ms"], beside["step_ms"]) == (2.0, 3.0)
    assert (its["products_ms"], its["compiler_ms"], its["to_host_ms"]) == (0.1, 0.02, 0.5)
    # A copy keeps nothing of compute busy: from the end of the product to the kernel's start.
    assert its["idle_ms"] == pytest.approx(0.05)
    assert beside["attention_ms"] == pytest.approx(0.03)
    assert beside["others_ms"] == pytest.approx(0.001)
    assert beside["idle_ms"] == pytest.approx(0.03)
    assert beside["to_host_ms"] == 0.0


def test_the_result_names_the_machine_that_all_arms_are_of(tmp_path, monkeypatch, capsys) -> None:
    a_file(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kernels.py", str(tmp_path), "--out", str(tmp_path)])
    kernels.main()
    assert "a-model-2" in capsys.readouterr().out
    result = json.loads((tmp_path / "h200-kernels.json").read_text())
    assert result["machine"] == {"gpu": "G"}
    assert [set(arm) for arm in result["arms"]] == [{"model", "arm", "its", "beside"}]
    other = tmp_path / "b-80-4.json.gz"
    text = gzip.decompress((tmp_path / "a-model-2-80-123.json.gz").read_bytes())
    other.write_bytes(gzip.compress(text.replace(b'"G"', b'"H"')))
    with pytest.raises(SystemExit, match="more than one machine"):
        kernels.main()
