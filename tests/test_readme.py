"""The README's session prints what the README says.

``OFFPLAN_UPDATE_EXPECTED=1 pytest tests/test_readme.py`` writes the printed output into it again.
Times and line numbers inside installed packages differ from machine to machine, and are left out of
the comparison.  Another torch makes other graphs, so it is for the version that the README shows.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from offplan.cli import app

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
COMMAND = re.compile(r"<!-- command:([\w-]+) -->\n```console\n\$ offplan (.*)\n```")
OUTPUT = r"(<!-- output:{name} -->\n```text\n)(.*?)(```)"
EXIT_CODES = {"analyze": 0, "gate": 0, "gate-fails": 3, "plot": 0, "explain": 0}


def comparable(text: str) -> str:
    text = re.sub(r"  took .*?\n\n", "  took ...\n\n", text, flags=re.DOTALL)
    return re.sub(r"(transformers/[\w/]+\.py):\d+", r"\1:...", text)


def shown_torch() -> str:
    found = re.search(r"torch (\d+\.\d+\.\d+)", README.read_text())
    assert found
    return found[1]


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch")
@pytest.mark.skipif(
    not torch.__version__.startswith(shown_torch())
    and not os.environ.get("OFFPLAN_UPDATE_EXPECTED"),
    reason=f"the README shows torch {shown_torch()}",
)
def test_the_session_prints_what_the_readme_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    # Graphs that analyze kept are what later commands draw.
    monkeypatch.setenv("OFFPLAN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "sample_graphs").symlink_to(ROOT / "sample_graphs")
    text = README.read_text()
    commands = COMMAND.findall(text)
    assert [name for name, _ in commands] == list(EXIT_CODES)
    for name, command in commands:
        result = CliRunner().invoke(app, shlex.split(command))
        assert result.exit_code == EXIT_CODES[name], result.stderr
        pattern = re.compile(OUTPUT.format(name=name), re.DOTALL)
        if os.environ.get("OFFPLAN_UPDATE_EXPECTED"):
            printed = result.stdout
            text = pattern.sub(lambda m, p=printed: m[1] + p + m[3], text)
        shown = pattern.search(text)
        assert shown, f"README has no output for {name}"
        assert comparable(result.stdout) == comparable(shown[2])
    if os.environ.get("OFFPLAN_UPDATE_EXPECTED"):
        README.write_text(text)


def test_commands_of_the_makefile_that_the_readme_names_exist():
    targets = set(re.findall(r"^(\w+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make (\w+)", README.read_text()))
    assert {"demo", "test"} <= named <= targets
