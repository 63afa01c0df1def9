"""The ``offplan`` command: one function of ``offplan.commands`` for each of its commands.

Results go to stdout, everything else to stderr.  Torch is imported inside the commands that trace:
``--help`` and ``gate`` on a plan file start without it.
"""

from __future__ import annotations

from typing import Annotated

import typer

import offplan
from offplan.commands.analyze import analyze
from offplan.commands.device import device
from offplan.commands.export import export
from offplan.commands.gate import gate
from offplan.commands.report import report
from offplan.commands.run import run

app = typer.Typer(
    name="offplan",
    help="Plan which activations of a PyTorch training step leave the GPU. Analysis needs no GPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (analyze, gate, run, report, device, export):
    app.command()(command)


def main() -> None:
    """Entry point of the ``offplan`` command."""
    app()


def _version(show: bool) -> None:
    if show:
        typer.echo(f"offplan {offplan.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
