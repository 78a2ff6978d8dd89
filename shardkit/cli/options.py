"""Options that several commands share."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer


def value_of(given: str | Path) -> str:
    """The value that was meant: of `-o=file` click takes `=file`. (A default is a path already.)"""
    return os.fspath(given).removeprefix("=")


def path_of(given: str | Path) -> Path:
    """The path, with `~` expanded: shells leave it in `--flag=~/file`."""
    return Path(os.path.expanduser(value_of(given)))


PATH: Any = {"parser": path_of, "metavar": "PATH"}
"""For typer: a file or folder."""

Script = Annotated[list[str] | None, typer.Argument(metavar="SCRIPT ARGUMENTS", show_default=False, hidden=True)]
Module = Annotated[str | None, typer.Option("-m", "--module", metavar="NAME", help="Run a module instead of a script.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="The YAML file; default: shardkit.yaml here or in a parent folder.", **PATH),
]
Processes = Annotated[
    str | None, typer.Option("-n", "--num-processes", metavar="N", help="Total number of ranks, on all machines.")
]
MachinesOrRange = Annotated[
    str | None, typer.Option("--num-machines", metavar="N", help="Number of machines; default: 1. MIN:MAX: elastic.")
]
Machines = Annotated[str | None, typer.Option("--num-machines", metavar="N", help="Number of machines; default: 1.")]
MachineRank = Annotated[
    str | None, typer.Option("--machine-rank", metavar="N", help="This machine's number, from 0 (default).")
]
Main = Annotated[str | None, typer.Option("--main", metavar="HOST:PORT", help="Address of machine 0.")]
Cpu = Annotated[bool, typer.Option("--cpu", help="Run on the CPU.")]
MixedPrecision = Annotated[
    str | None, typer.Option("--mixed-precision", metavar="DTYPE", help="no, fp16, bf16, fp8 or mxfp8.")
]
Fsdp = Annotated[
    str | None,
    typer.Option("--fsdp", metavar="WORDS", help='FSDP options in the Trainer\'s syntax: "full shard auto_wrap".'),
]
FsdpConfig = Annotated[
    Path | None,
    typer.Option("--fsdp-config", help="JSON or YAML file with FSDP settings in the Trainer's syntax.", **PATH),
]
Lora = Annotated[
    str | None, typer.Option(metavar="RANK", help="Train LoRA adapters of this rank; all other weights are frozen.")
]
LoraTargets = Annotated[
    str | None,
    typer.Option(metavar="NAMES", help="Linear layers with adapters: q_proj,v_proj; default: all in the blocks."),
]
LoadIn4Bit = Annotated[
    bool, typer.Option("--load-in-4bit", help="With --lora: frozen weights of the blocks in 4 bits (QLoRA).")
]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume", metavar="WHICH", help="auto (the newest valid checkpoint), never (default), or one's path or URL."
    ),
]
ResumeOfJob = Annotated[
    str | None,
    typer.Option("--resume", metavar="WHICH", help="auto (default): a job begins at its newest valid checkpoint."),
]
Restarts = Annotated[
    str | None,
    typer.Option(
        "--restarts",
        metavar="N",
        help="How often to restart after a failure, from the newest checkpoint; default: 0.",
    ),
]
Show = Annotated[
    str | None, typer.Option("--show", metavar="RANKS", help="Whose output to show: all (default), or ranks like 0,1.")
]
NoPrefix = Annotated[bool, typer.Option("--no-prefix", help="Show lines without their rank.")]
Measure = Annotated[bool, typer.Option("--measure", help="Record the peak memory of each rank.")]
AsAccelerate = Annotated[
    bool,
    typer.Option("--as-accelerate", help="Replace accelerate by shardkit.compat, in the script and in libraries."),
]
AcceleratesMeaning = Annotated[
    list[str] | None,
    typer.Option(
        "--accelerates-meaning",
        metavar="WORDS",
        help="With --as-accelerate: use Accelerate's behavior for these (scheduler, position, save); repeatable.",
    ),
]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one value; repeatable.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]


def plain_settings(
    processes: str | None,
    cpu: bool,
    mixed_precision: str | None,
    resume: str | None,
    restarts: str | None,
    show: str | None,
) -> dict[str, str | None]:
    """The settings of these flags; None: not given."""
    return {
        "num_processes": by("--num-processes", processes),
        "use_cpu": by("--cpu", "true" if cpu else None),
        "mixed_precision": by("--mixed-precision", mixed_precision),
        "shardkit.checkpoint.resume": by("--resume", resume),
        "shardkit.launch.max_restarts": by("--restarts", restarts),
        "shardkit.launch.show": by("--show", show),
    }


def by(flag: str, value: str | None) -> str | None:
    """The value of a setting, with the name of its flag for error messages; None: not given."""
    from shardkit.config.layers import FlagValue

    return None if value is None else FlagValue(value, flag)
