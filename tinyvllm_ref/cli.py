"""The ``tinyvllm`` command."""

from __future__ import annotations

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="tinyvllm: an LLM inference engine to read, to use and to learn from.",
)


@app.callback()
def _root() -> None:
    """Commands come below; this keeps them named even while there is only one."""


@app.command()
def doctor() -> None:
    """Say what was found on this machine, and what to do about what was not."""
    from .doctor import examine

    for finding in examine():
        typer.echo(str(finding))


def main() -> None:
    """Entry point of the command."""
    app()
