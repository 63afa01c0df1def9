"""How every command behaves: help with examples, versions, quiet and verbose, completion."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import offplan
from offplan.cli import EXAMPLES, app

GROUP = typer.main.get_command(app)
COMMANDS = GROUP.commands  # type: ignore[attr-defined]
PLAN = Path(__file__).parent / "schema_2.plan.yaml"


def invoke(*words: str, **environment: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, list(words), env=environment)
    return found.exit_code, found.stdout, found.stderr


def test_every_command_has_examples() -> None:
    assert set(EXAMPLES) == set(COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_shows_examples_as_they_stand(name: str) -> None:
    code, text, _ = invoke(name, "--help", COLUMNS="80")
    assert code == 0
    for example in EXAMPLES[name]:
        assert example in text
    for option in ("--quiet", "--verbose", "--traceback"):
        assert option in text


@pytest.mark.parametrize("example", [line for lines in EXAMPLES.values() for line in lines])
def test_an_example_is_right_usage(example: str) -> None:
    program, name, *words = shlex.split(example)
    assert program == "offplan"
    # Reads the words and does nothing.
    COMMANDS[name].make_context(name, words)


def test_an_example_that_is_not_would_be_found() -> None:
    with pytest.raises(Exception, match="no-such-option"):
        COMMANDS["gate"].make_context("gate", ["--no-such-option"])


def test_the_version_names_torch_and_the_device() -> None:
    code, text, _ = invoke("--version")
    first, second = text.splitlines()
    assert code == 0
    assert first == f"offplan {offplan.__version__}"
    assert second.startswith("torch 2.")
    assert "GPU" in second or "NVIDIA" in second


def test_quiet_leaves_results_and_errors() -> None:
    loud = invoke("export", str(PLAN), "--to", "json")
    quiet = invoke("export", str(PLAN), "--to", "json", "-q")
    assert loud[1] == quiet[1] != ""
    assert loud[2] != ""
    assert quiet[2] == ""
    code, text, said = invoke("gate", "gone.plan.yaml", "--quiet")
    assert (code, text) == (1, "")
    assert "cannot read gone.plan.yaml" in said


def test_quiet_and_verbose_are_opposites() -> None:
    code, _, said = invoke("gate", str(PLAN), "-q", "-v")
    assert code == 2
    assert "opposites" in said


@pytest.mark.parametrize("width", ["40", "80", "120"])
def test_reports_keep_within_the_terminal(width: str) -> None:
    code, text, _ = invoke("gate", str(PLAN), "--max-alias-skipped", "1TB", COLUMNS=width)
    assert code == 0
    assert max(map(len, text.splitlines())) <= int(width)


def test_a_shell_can_complete_commands() -> None:
    program = Path(sys.executable).with_name("offplan")
    if not program.exists():
        pytest.skip("offplan is not installed beside this Python")
    words = {"COMP_WORDS": "offplan ex", "COMP_CWORD": "1", "_OFFPLAN_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [program], env={**os.environ, **words}, capture_output=True, text=True, check=True
    )
    assert "export" in done.stdout.split()
    assert "analyze" not in done.stdout.split()
