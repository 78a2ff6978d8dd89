"""Ray Train: a driver script, which runs the training script on each worker of a TorchTrainer."""

from shardkit.digits import number_in
from shardkit.plan.devices import DEVICES
from shardkit.submit.job import Job, head

OPTIONS = {
    "storage": "folder or URL for Ray's results, which all machines can access",
    "min-workers": "elastic training: the smallest number of workers to continue with if machines are lost",
}

# Names of AMD's GPUs in shardkit plan -> in Ray (ray.util.accelerators). Those of NVIDIA: see `accelerator`.
_GPUS = {
    "mi250-64": "AMD-Instinct-MI250X-MI250",
    "mi250x-64": "AMD-Instinct-MI250X",
    "mi300x-192": "AMD-Instinct-MI300X-OAM",
    "mi325x-256": "AMD-Instinct-MI325X-OAM",
    "mi350x-288": "AMD-Instinct-MI350X-OAM",
    "mi355x-288": "AMD-Instinct-MI355X-OAM",
}


def problems(job: Job) -> list[str]:
    """Problems that Ray would reject."""
    fewest = job.options.get("min-workers")
    if fewest is None or 0 < (number_in(fewest) or 0) <= job.config.num_processes:
        return []
    return [f"--option min-workers: not a number from 1 to {job.config.num_processes} (got {fewest!r}); give one."]


def render(job: Job) -> str:
    """The driver, a Python file to run in the folder of the script."""
    workers = job.config.num_processes
    each = max(1, job.cpus_per_machine // job.ranks_per_machine)
    resources = {"CPU": each, **({"GPU": 1} if job.gpus_per_machine else {})}
    number = f"({int(job.options['min-workers'])}, {workers})" if "min-workers" in job.options else str(workers)
    scaling = [
        f"num_workers={number}",
        f"use_gpu={bool(job.gpus_per_machine)}",
        f"resources_per_worker={resources!r}",
    ]
    if job.gpu is not None and job.gpus_per_machine and (kind := accelerator(job.gpu)):
        scaling.append(f"accelerator_type={kind!r}")
    run = [f"name={job.name!r}"]
    if "storage" in job.options:
        run.append(f"storage_path={job.options['storage']!r}")
    # -1: no limit, for runs that continue on fewer machines.
    restarts = job.config.shardkit.launch.max_restarts or (-1 if "min-workers" in job.options else 0)
    run.append(f"failure_config=FailureConfig(max_failures={restarts})")
    how = "Start it with: ray job submit --working-dir . -- python FILE"
    script, *arguments = job.command
    return f'''{head(job, how)}
import os

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from shardkit.ray import run_script

CONFIGURATION = """\\
{job.configuration.replace(chr(92), chr(92) * 2).replace('"' * 3, chr(92) + '"' * 3)}"""

if __name__ == "__main__":
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # workers stay in the folder of the script
    TorchTrainer(
        run_script,
        train_loop_config={{
            "script": {script!r},
            "arguments": {arguments!r},
            "is_module": {job.is_module!r},
            "configuration": CONFIGURATION,
        }},
        scaling_config=ScalingConfig({", ".join(scaling)}),
        run_config=RunConfig({", ".join(run)}),
    ).fit()
'''


def accelerator(device: str) -> str | None:
    """Ray's name for a device: `h100-80` -> `H100`. None for NVIDIA's RTX cards, whose names differ between versions of
    Ray: a job that asks for a name that no machine has waits for ever."""
    name = DEVICES[device].name.split()[0]
    return None if name == "RTX" else _GPUS.get(device, name)
