"""`shardkit migrate script.py`: changes the imports of a script that was written for Accelerate."""

from pathlib import Path
from typing import Annotated

import typer

from shardkit.cli import HELP

app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=HELP)


@app.command(context_settings=HELP)
def migrate(
    given: Annotated[
        list[Path], typer.Argument(metavar="SCRIPT", help="Python files, or folders of them.", show_default=False)
    ],
    write: Annotated[bool, typer.Option("--write", help="Change the files.")] = False,
) -> None:
    """Print a diff that makes SCRIPT run on shardkit, and remarks on differences that the diff does not solve."""
    from shardkit.compat.migrate import change_of, remarks, scripts
    from shardkit.config import files
    from shardkit.problems import Problems

    problems = Problems()
    found = [problems.of(change_of, path) for path in scripts(given)]
    problems.raise_all("Nothing was changed." if write else "")
    changes = [change for change in found if change is not None]
    said: set[str] = set()
    for change in changes:
        diff = change.diff()
        typer.echo(diff or f"{change.path}: does not import accelerate; nothing to change.", nl=not diff)
        for line in remarks(change.found):
            if line not in said:  # differences are those of all files
                typer.echo(line, err=True)
                said.add(line)
        if write and diff:
            files.write_text(change.new, change.path, "check its permissions")
            typer.echo(f"{change.path}: changed.", err=True)
    if not any(change.new != change.old or "shardkit" in change.old for change in changes):
        typer.echo("A plain PyTorch script is changed by hand: see docs/how-to/training-script.md.", err=True)
