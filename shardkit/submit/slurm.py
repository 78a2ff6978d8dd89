"""SLURM: a batch script with one `shardkit launch` per machine, which requeues itself after a preemption."""

import re
import shlex

from shardkit.errors import EXIT_PREEMPTED
from shardkit.submit.job import PEERS_S, Job, configuration_file, folded, head, memory_in_gib

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
        elif not re.fullmatch(r"[a-z][a-z0-9-]*", key):
            found.append(f"--option: not a long option of sbatch without dashes (got {key!r}); write partition=gpu.")
        elif "\n" in value:
            found.append(f"--option {key}: contains a line break (got {value!r}); remove it.")
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
                f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={shlex.quote(value)}"
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
        ("mem", memory),  # 0: all memory of a machine
    ]
    if job.gpus_per_machine:
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
        *([] if "output" in given else [("output", "%x-%j.log")]),
        *given.items(),
    ]


def time_text(seconds: int) -> str:
    """D-HH:MM:SS, the format of sbatch."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours // 24}-{hours % 24:02d}:{minutes:02d}:{rest:02d}"
