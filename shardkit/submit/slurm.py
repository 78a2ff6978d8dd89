"""SLURM: a batch script with one `shardkit launch` per machine, which requeues itself after a preemption."""

import re
import shlex

from shardkit.digits import number_in
from shardkit.errors import EXIT_PREEMPTED
from shardkit.submit.job import PEERS_S, Job, configuration_file, folded, head, memory_in_gib
from shardkit.wording import counted

# Options of sbatch that this file writes, and the flags or settings that they depend on.
OURS = {
    "job-name": "--name",
    "nodes": "num_machines",
    "ntasks": "num_machines",
    "ntasks-per-node": "one launch per machine",
    "cpus-per-task": "--cpus",
    "gpus-per-node": "num_processes",
    "mem": "--memory",
    "time": "--time",
    "signal": "shardkit.launch.stop_timeout_s",
    "requeue": "exit code 75",
    "chdir": "the folder of the script's paths",
    "open-mode": "the requeue",
}


_OTHER_MEMORY = ("mem-per-cpu", "mem-per-gpu")
"""Options of sbatch that exclude `mem`."""

EARLIER_S = 60
"""How much earlier than asked for SLURM may send the signal (sbatch(1), --signal)."""


def problems(job: Job) -> list[str]:
    """Options that sbatch would reject, or that shardkit sets; a job that would be told to stop when it starts."""
    found = []
    if job.time_s is not None and job.time_s <= job.grace_s + EARLIER_S:
        found.append(
            f"--time: leaves no time to train (got {time_text(job.time_s)}): SIGTERM comes {job.grace_s} s before the "
            f"end, or up to {EARLIER_S} s earlier; give more, or less to save: --set shardkit.launch.stop_timeout_s=N."
        )
    for key, value in job.options.items():
        if key in OURS:
            found.append(f"--option {key}: is set by shardkit (from {OURS[key]}); change that, and remove the option.")
        elif not re.fullmatch(r"[a-z][a-z0-9-]+", key):
            found.append(f"--option: not a long option of sbatch without dashes (got {key!r}); write partition=gpu.")
        elif "\n" in value:
            found.append(f"--option {key}: contains a line break (got {value!r}); remove it.")
    if re.search(r"[\\\n]", str(job.folder)):
        found.append(
            f"submit: SLURM writes no log below a folder with a backslash or a line break (got {str(job.folder)!r}); "
            "rename it."
        )
    if (count := _gpus_of_gres(job)) is not None and job.gpus_per_machine not in (0, count):
        found.append(
            f"--option gres: another number of GPUs than a machine has ranks (got {job.options['gres']}, and "
            f"{counted(job.gpus_per_machine, 'rank')}); change it, or num_processes."
        )
    if job.memory_bytes is not None and (other := [name for name in _OTHER_MEMORY if name in job.options]):
        found.append(f"--option {other[0]}: says the memory in another way than --memory; remove one of them.")
    return found


def render(job: Job) -> str:
    """The batch script. Each task gets its machine's number, the address of machine 0 and the port from SLURM."""
    logs = f'"runs/{job.name}-$SLURM_JOB_ID"'
    # Do not kill at once: tasks that have saved end within seconds, and the code of a killed task would hide the 75.
    step = ["srun", "--kill-on-bad-exit=0", f"--wait={PEERS_S}", '--cpus-per-task="$SLURM_CPUS_PER_TASK"']
    launch = job.launch_words(f'{logs[:-1]}/shardkit.yaml"', ["--logs", f'{logs[:-1]}/${{SLURM_RESTART_COUNT:-0}}"'])
    return "\n".join(
        [
            "#!/bin/bash",
            head(job, "Submit it with: sbatch FILE"),
            *(
                f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={_quoted(value)}"
                for name, value in _options(job)
            ),
            "",
            f"mkdir -p {logs}",
            configuration_file(job.configuration, f'{logs[:-1]}/shardkit.yaml"'),
            "",
            f"# {PEERS_S} s after the first machine has ended, SLURM kills those that are still running.",
            folded([*step, *launch]),
            "code=$?",
            f"# {EXIT_PREEMPTED}: preempted, and saved. The job is requeued, and resumes when SLURM starts it again.",
            f'if [ "$code" -eq {EXIT_PREEMPTED} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
            'exit "$code"',
            "",
        ]
    )


def _options(job: Job) -> list[tuple[str, str | None]]:
    memory = "0" if job.memory_bytes is None else f"{memory_in_gib(job.memory_bytes)}G"
    options: list[tuple[str, str | None]] = [
        ("job-name", job.name),
        ("nodes", str(job.machines)),
        ("ntasks-per-node", "1"),
        ("cpus-per-task", str(job.cpus_per_machine)),
    ]
    if not any(name in job.options for name in _OTHER_MEMORY):
        options.append(("mem", memory))  # 0: all memory of a machine
    if job.gpus_per_machine and _gpus_of_gres(job) is None:
        options.append(("gpus-per-node", str(job.gpus_per_machine)))
    if job.time_s is not None:
        options.append(("time", time_text(job.time_s)))
    given = {name: value or None for name, value in job.options.items()}
    return [
        *options,
        ("signal", f"TERM@{job.grace_s}"),
        ("requeue", None),
        ("open-mode", "append"),
        ("chdir", str(job.folder)),
        *([] if "output" in given else [("output", f"{_folder_in_pattern(job)}%x-%j.log")]),
        *given.items(),
    ]


def _quoted(value: str) -> str:
    """A value in a line of sbatch, which reads quotes as a shell does, but backslashes in all of them as in none."""
    return shlex.quote(value).replace("\\", "\\\\")


def _folder_in_pattern(job: Job) -> str:
    """What goes before the name of the log: SLURM also replaces `%j` in the folder that it adds by itself."""
    folder = str(job.folder)
    return folder.replace("%", "%%") + "/" if "%" in folder else ""


def _gpus_of_gres(job: Job) -> int | None:
    """The GPUs of a machine in the option `gres` (`gpu:a100:8`), which sbatch takes in place of --gpus-per-node, not
    beside it; None if it names none."""
    parts = [part.removeprefix("gres:").split(":") for part in job.options.get("gres", "").split(",")]
    counts = [number_in(words[-1]) for words in parts if words[0] == "gpu"]
    return sum(1 if count is None else count for count in counts) if counts else None


def time_text(seconds: int) -> str:
    """D-HH:MM:SS, the format of sbatch."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours // 24}-{hours % 24:02d}:{minutes:02d}:{rest:02d}"
