"""Options that several commands have, each said once."""

from pathlib import Path
from typing import Annotated

import typer

Script = Annotated[list[str] | None, typer.Argument(metavar="SCRIPT ARGUMENTS", show_default=False)]
Module = Annotated[str | None, typer.Option("-m", "--module", help="Run a module instead of a script.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="The YAML; else it is looked for.")]
Processes = Annotated[
    str | None, typer.Option("-n", "--num-processes", metavar="N", help="Number of ranks, over all machines together.")
]
MachinesOrRange = Annotated[
    str | None, typer.Option("--num-machines", metavar="N", help="Number of machines; MIN:MAX: elastic.")
]
Machines = Annotated[str | None, typer.Option("--num-machines", metavar="N", help="Number of machines.")]
MachineRank = Annotated[str | None, typer.Option("--machine-rank", metavar="N", help="This machine's number, from 0.")]
Main = Annotated[str | None, typer.Option("--main", metavar="HOST:PORT", help="Machine 0.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting; may be given several times.")
]
