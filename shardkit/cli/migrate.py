"""`shardkit migrate script.py`: changes the imports of a script that was written for Accelerate."""

from pathlib import Path
from typing import Annotated

import typer

from shardkit.cli import HELP

app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=HELP)


@app.command(context_settings=HELP)
def migrate(
    given: Annotated[
        list[Path], typer.Argument(metavar="SCRIPT...", help="Python files, or folders of them.", show_default=False)
    ],
    write: Annotated[bool, typer.Option("--write", help="Change the files.")] = False,
) -> None:
    """Print a diff that makes SCRIPT run on shardkit, and remarks on differences that the diff does not solve."""
    from shardkit.compat import migrate as change
    from shardkit.config import files
    from shardkit.problems import Problems

    problems = Problems()
    changes = {path: problems.of(change.diff, path) for path in change.scripts(given)}
    said: set[str] = set()
    problems.raise_all("Nothing was changed." if write else "")
    for path, one in changes.items():
        assert one is not None
        text, found = one
        typer.echo(text or f"{path}: does not import accelerate; nothing to change.", nl=not text)
        for line in change.remarks(found):
            if line not in said:  # differences are those of all files
                typer.echo(line, err=True)
                said.add(line)
        if write and text:
            files.write_text(change.migrated(change.source(path), str(path)), path, "check its permissions")
            typer.echo(f"{path}: changed.", err=True)
    if changes and not any(one[0] or "shardkit" in change.source(path) for path, one in changes.items() if one):
        typer.echo("A plain PyTorch script is changed by hand: see docs/how-to/training-script.md.", err=True)
