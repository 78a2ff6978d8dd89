"""The commands that the wizard prints at its end: each works as it stands there, in the folder where it was saved."""

import shlex
from pathlib import Path

from shardkit.config.command import command_for, config_flag
from shardkit.config.schema import Config
from shardkit.wizard.situation import SLURM, Situation

SCRIPT = "SCRIPT.py"
"""Stands for the training script where there is none yet."""
PLACEHOLDERS = {
    SCRIPT: "your training script",
    "HOST": "the address of machine 0",
    " N": "the machine's number, from 0",
    "MODULE:FUNCTION": "a function that returns your model",
}
MOST_LINES = 4
"""Up to so many machines, the command of each is printed."""


def lines(s: Situation, path: Path, model: str | None) -> list[str]:
    """What to type next, a line each with what it is for before it."""
    return [*(f"{label}: {command}" for label, command in _launches(s, path)), f"Plan it: {_plan(s, path, model)}"]


def meanings(lines: list[str]) -> str:
    """What the words in capitals stand for; "" where there are none."""
    text = "\n".join(lines)
    found = [f"{word.strip()} is {meaning}" for word, meaning in PLACEHOLDERS.items() if word in text]
    return f"Here, {' and '.join(found)}." if found else ""


def _launches(s: Situation, path: Path) -> list[tuple[str, str]]:
    """How the file is used: on one machine, on each of several, under SLURM."""
    script = shlex.quote(training_script(s.folder))

    def launch(*flags: str) -> str:
        return " ".join(["shardkit", f"launch{config_flag(path)}", *flags, script])

    if s.machines == 1:
        return [("Run it", launch())]
    if s.where == SLURM:
        gpus = [] if s.on_cpu else [f"--gpus-per-node={s.per_machine}"]
        return [("Run it", " ".join(["srun", f"--nodes={s.machines}", "--ntasks-per-node=1", *gpus, launch()]))]
    main = [] if s.answers.get("address") else ["--main HOST"]
    if s.machines <= MOST_LINES:
        return [(f"Run it on machine {n}", launch(*main, f"--machine-rank {n}")) for n in range(s.machines)]
    return [("Run it on every machine", launch(*main, "--machine-rank N"))]


def _plan(s: Situation, path: Path, model: str | None) -> str:
    """How the plan of the same run is shown; without a model in the file, one has to be named."""
    flags = ["" if model else " --model MODULE:FUNCTION", f" --device {s.planned_device}" if s.planned_device else ""]
    return f"shardkit plan{config_flag(path)}{''.join(flags)}"


def config_line(config: Config, model: str | None, path: Path | None, is_user: bool) -> str:
    """The line that writes the same file again, where nobody is asked."""
    command = f"{command_for(config, path)} --force"
    command += f" --model {shlex.quote(model)}" if model else ""
    return command + (" --user" if is_user else "")


def training_script(folder: Path) -> str:
    """train.py, or the only other script in the folder that runs on shardkit or Accelerate; else a word for it."""
    if (folder / "train.py").is_file():
        return "train.py"
    found = [path.name for path in sorted(folder.glob("*.py")) if _is_training_script(path)]
    return found[0] if len(found) == 1 else SCRIPT


def _is_training_script(path: Path) -> bool:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return False
    return any(f"{word} {name}" in text for word in ("import", "from") for name in ("shardkit", "accelerate"))
