"""SkyPilot: a managed job, which it starts again on other machines when these are taken away."""

from typing import Any

from shardkit.errors import EXIT_PREEMPTED
from shardkit.submit.job import Job, configuration_file, folded, head, memory_in_gib
from shardkit.submit.kubernetes import yaml_text

OPTIONS = {
    "infra": "where: aws, gcp/us-central1, kubernetes, ...",
    "use-spot": "true: machines that may be taken away, for less",
    "setup": "a command that runs once on each machine, e.g. pip install shardkit",
    "disk-size": "GB of each machine's disk",
    "instance-type": "a cloud's own name of the machine",
}

# Our names of devices, without their memory, as `sky show-gpus` spells them where that is another.
_GPUS = {"a100-40": "A100", "a100-80": "A100-80GB", "v100-32": "V100-32GB", "3090": "RTX3090", "4090": "RTX4090"}


def problems(job: Job) -> list[str]:
    """What is missing, and what SkyPilot would not understand."""
    found = []
    if job.gpus_per_machine and job.gpu is None and "instance-type" not in job.options:
        found.append("--device: which GPUs? SkyPilot chooses machines by them; add --device h100-80.")
    if job.options.get("use-spot", "true") not in ("true", "false"):
        found.append(f"--option use-spot: is true or false (got {job.options['use-spot']!r}); write use-spot=true.")
    if not job.options.get("disk-size", "1").isdigit():
        found.append(f"--option disk-size: is a number of GB (got {job.options['disk-size']!r}); write disk-size=512.")
    return found


def render(job: Job) -> str:
    """The task. Machines know their number and the head's address from SKYPILOT_NODE_RANK and SKYPILOT_NODE_IPS."""
    resources: dict[str, Any] = {
        "cpus": f"{job.cpus_per_machine}+",
        "job_recovery": {
            "recover_on_exit_codes": [EXIT_PREEMPTED],
            "max_restarts_on_errors": job.config.shardkit.launch.max_restarts,
        },
    }
    if job.gpus_per_machine and job.gpu:
        resources["accelerators"] = f"{accelerator(job.gpu)}:{job.gpus_per_machine}"
    if job.memory_bytes is not None:
        resources["memory"] = f"{memory_in_gib(job.memory_bytes)}+"
    if job.image is not None:
        resources["image_id"] = f"docker:{job.image}"
    for option, key in (("infra", "infra"), ("instance-type", "instance_type")):
        if option in job.options:
            resources[key] = job.options[option]
    if "use-spot" in job.options:
        resources["use_spot"] = job.options["use-spot"] == "true"
    if "disk-size" in job.options:
        resources["disk_size"] = int(job.options["disk-size"])
    launch = folded(job.launch_words("/tmp/shardkit.yaml", ["--logs", '"runs/$SKYPILOT_TASK_ID"']))
    task: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.machines,
        "workdir": ".",
        "resources": resources,
        "file_mounts": {one.path: {"source": one.source, "mode": "MOUNT"} for one in job.volumes},
        "setup": job.options.get("setup"),
        "run": f"{configuration_file(job.configuration, '/tmp/shardkit.yaml')}\n{launch}\n",
    }
    how = "Start it with: sky jobs launch FILE, in the folder of the script, which goes along."
    top = "".join(f"# {line}\n" for line in head(job, how))
    return top + yaml_text({name: value for name, value in task.items() if value})


def accelerator(device: str) -> str:
    """SkyPilot's name of a device: `h100-80` -> `H100`."""
    return _GPUS.get(device.lower()) or device.split("-")[0].upper()
