"""The ``offplan`` command: one function of ``offplan.commands`` for each of its commands.

Results go to stdout, everything else to stderr.  Torch is imported inside the commands that trace:
``--help`` and ``gate`` on a plan file start without it.
"""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

import offplan
from offplan.commands.analyze import analyze
from offplan.commands.device import device
from offplan.commands.diff import diff
from offplan.commands.explain import explain
from offplan.commands.export import export
from offplan.commands.gate import gate
from offplan.commands.report import report
from offplan.commands.run import run
from offplan.commands.sweep import sweep
from offplan.commands.verify import verify

# What each command's help ends with.
EXAMPLES = {
    "analyze": (
        "offplan analyze model.py -p batch=8 --budget 80%",
        "offplan analyze hf:qwen3 -p layers=4 -p seq=4096 --compiler inductor --plot",
        "offplan analyze model.py --budgets --format markdown",
    ),
    "sweep": (
        "offplan sweep model.py -p batch=1..16 -p seq=2048,4096,8192 --budget 80GiB",
        "offplan sweep model.py -p batch=1..256 -p seq=2048,4096 --budget auto --largest batch",
    ),
    "explain": (
        "offplan explain",
        "offplan explain offplan.plan.yaml layers.3.mlp",
        "offplan explain offplan.plan.yaml '#123' --format json",
    ),
    "diff": (
        "offplan diff main.plan.yaml offplan.plan.yaml",
        "offplan diff main.plan.yaml offplan.plan.yaml --exit-code --format markdown",
    ),
    "gate": (
        "offplan gate --max-alias-skipped 0 --max-peak 80GiB",
        "offplan gate --baseline main.plan.yaml --max-growth 5% --format github",
        "offplan gate model.py -p batch=4 --max-alias-skipped 0 --report junit=gate.xml",
    ),
    "run": (
        "offplan run offplan.plan.yaml -o measured.json",
        "offplan run model.py -p batch=4 --budget floor --compiler inductor",
        "offplan run model.py --device cpu --budget 0 --compare no-view,whole-storage",
    ),
    "verify": (
        "offplan verify",
        "offplan verify model.py -p batch=4 --device cpu --no-cases",
        "offplan verify --case interleaved-qkv --case unfolded --repeats 50 --compiler inductor",
        "offplan verify made.plan.yaml --target package.model:build --no-cases",
    ),
    "report": (
        "offplan report offplan.plan.yaml -o report.html",
        "offplan report offplan.plan.yaml measured.json",
        "offplan report --plot",
    ),
    "device": (
        "offplan device -o gpu.yaml",
        "offplan device h100",
        "offplan device --host --max-pin 64GiB",
    ),
    "export": (
        "offplan export --to perfetto -o trace.json.gz",
        "offplan export --to saved-for-offloading -o marks.py",
        "offplan export --to blocks --snapshot measured.pickle",
    ),
}

app = typer.Typer(
    name="offplan",
    help="Plan which activations of a PyTorch training step leave the GPU. Analysis needs no GPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (analyze, sweep, explain, diff, gate, run, verify, report, device, export):
    # As they stand: help would make one paragraph of them.
    shown = "\n".join(("\b", "Examples:", *(f"  {line}" for line in EXAMPLES[command.__name__])))
    app.command(epilog=shown)(command)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"offplan {offplan.__version__}")
        typer.echo(f"torch {_torch()}, Python {platform.python_version()}, {_device()}")
        raise typer.Exit


def _torch() -> str:
    """The version of torch that is installed; importing it would take seconds."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "not installed"


def _device() -> str:
    """The GPUs that the driver names, without asking it to start."""
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with suppress(OSError):
            lines = path.read_text(errors="replace").splitlines()
            found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]
    return ", ".join(found) or "no GPU"


@app.callback()
def _root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print versions, and the GPUs here."
        ),
    ] = False,
) -> None:
    pass
