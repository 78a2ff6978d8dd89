"""The commands that the wizard prints at the end. Each can be pasted as printed, in the folder of the file."""

import shlex
from pathlib import Path

from shardkit.config.command import config_flag
from shardkit.config.hardware_defaults import cores_of_job
from shardkit.wizard.conditions import pod
from shardkit.wizard.situation import SLURM, Situation

SCRIPT = "SCRIPT.py"
"""Placeholder for the training script where there is none yet."""
PLACEHOLDERS = {
    SCRIPT: "your training script",
    "HOST": "the address of machine 0",
    "TPU_NAME": "the name of the TPU",
    " N": "the machine's number, from 0",
    "MODULE:FUNCTION": "a function that returns your model",
}
MOST_LINES = 4
"""Up to this many machines, a command is printed for each."""


def lines(s: Situation, path: Path, model: str | None) -> list[str]:
    """The next commands, one per line, each with a label."""
    return [*(f"{label}: {command}" for label, command in _launches(s, path)), f"Plan it: {_plan(s, path, model)}"]


def meanings(lines: list[str]) -> str:
    """An explanation of the placeholders; "" where there are none."""
    text = "\n".join(lines)
    found = [f"{word.strip()} is {meaning}" for word, meaning in PLACEHOLDERS.items() if word in text]
    return f"Here, {' and '.join(found)}." if found else ""


def _launches(s: Situation, path: Path) -> list[tuple[str, str]]:
    """The launch commands: on one machine, on each of several, under SLURM, for a TPU pod."""
    script = shlex.quote(training_script(s.folder))

    def launch(*flags: str) -> str:
        return " ".join(["shardkit", f"launch{config_flag(path)}", *flags, script])

    if s.where == SLURM:
        # srun gives a task one core unless told otherwise, and all ranks of a machine are in one task.
        each = [f"--cpus-per-task={cores_of_job(s.per_machine, s.on_cpu)}"]
        each += [] if s.on_cpu else [f"--gpus-per-node={s.per_machine}"]
        return [
            ("Run it", " ".join(["srun", f"--nodes={s.machines}", "--ntasks-per-node=1", *each, launch()])),
            ("Queue it", f"shardkit submit{config_flag(path)} --to slurm --submit {script}"),
        ]
    if s.machines == 1 and not pod(s):
        return [("Run it", launch())]
    main = [] if s.answers.get("address") or s.machines == 1 else ["--main HOST"]
    if pod(s):
        is_named = s.answers.get("tpu_name") or s.answers.get("tpu_vm")
        return [("Run it", launch(*main, *([] if is_named else ["--set tpu_name=TPU_NAME"])))]
    if s.machines <= MOST_LINES:
        return [(f"Run it on machine {n}", launch(*main, f"--machine-rank {n}")) for n in range(s.machines)]
    return [("Run it on every machine", launch(*main, "--machine-rank N"))]


def _plan(s: Situation, path: Path, model: str | None) -> str:
    """The plan command of the same run; without a model in the file it has a placeholder for one."""
    flags = [] if model else [" --model MODULE:FUNCTION"]
    flags += [f" {' '.join(s.adapters.flags)}"] if s.adapters else []
    flags += [f" --device {shlex.quote(s.planned_device)}"] if s.planned_device else []  # it may be `48 GiB`
    return f"shardkit plan{config_flag(path)}{''.join(flags)}"


def training_script(folder: Path) -> str:
    """train.py, or the only other script in the folder that imports shardkit or Accelerate; else a placeholder."""
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
