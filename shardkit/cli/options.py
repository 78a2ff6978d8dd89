"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Script = Annotated[list[str] | None, typer.Argument(metavar="SCRIPT ARGUMENTS", show_default=False)]
Module = Annotated[str | None, typer.Option("-m", "--module", help="Run a module instead of a script.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="The YAML file; default: shardkit.yaml here or in a parent folder.")
]
Processes = Annotated[
    str | None, typer.Option("-n", "--num-processes", metavar="N", help="Total number of ranks, on all machines.")
]
MachinesOrRange = Annotated[
    str | None, typer.Option("--num-machines", metavar="N", help="Number of machines; MIN:MAX: elastic.")
]
Machines = Annotated[str | None, typer.Option("--num-machines", metavar="N", help="Number of machines.")]
MachineRank = Annotated[str | None, typer.Option("--machine-rank", metavar="N", help="This machine's number, from 0.")]
Main = Annotated[str | None, typer.Option("--main", metavar="HOST:PORT", help="Address of machine 0.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one value; repeatable.")]
