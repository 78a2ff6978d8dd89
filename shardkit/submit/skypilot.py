"""SkyPilot: a managed job, which SkyPilot restarts on other machines after a preemption."""

from typing import Any

from shardkit.digits import number_in
from shardkit.errors import EXIT_PREEMPTED
from shardkit.submit.job import Job, configuration_file, folded, head, memory_in_gib
from shardkit.submit.kubernetes import yaml_text

OPTIONS = {
    "infra": "aws, gcp/us-central1, kubernetes, ...",
    "use-spot": "true: use spot instances",
    "setup": "a command that runs once on each machine, e.g. pip install shardkit",
    "disk-size": "disk size of each machine in GB",
    "instance-type": "the cloud's name of the machine type",
}

# Names of devices in shardkit plan -> in `sky show-gpus`, where the rule in `accelerator` does not apply.
_GPUS = {
    "a100-40": "A100",
    "a100-80": "A100-80GB",
    "a100-pcie": "A100-80GB",
    "v100-32": "V100-32GB",
    "3090-24": "RTX3090",
    "4090-24": "RTX4090",
    "5090-32": "RTX5090",
    "6000-ada-48": "RTX6000-Ada",
    "6000-pro-96": "RTXPRO6000",
}


def problems(job: Job) -> list[str]:
    """Missing settings, and values that SkyPilot would reject."""
    found = []
    if job.gpus_per_machine and job.gpu is None and "instance-type" not in job.options:
        found.append("--device: the GPU type is missing (got no name of one); add one such as --device h100-80.")
    if job.options.get("use-spot", "true") not in ("true", "false"):
        found.append(f"--option use-spot: not a boolean (got {job.options['use-spot']!r}); write true or false.")
    if number_in(job.options.get("disk-size", "1")) is None:
        found.append(f"--option disk-size: not a number of GB (got {job.options['disk-size']!r}); write disk-size=512.")
    return found


def render(job: Job) -> str:
    """The task. SKYPILOT_NODE_RANK and SKYPILOT_NODE_IPS have a machine's number and the address of machine 0."""
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
        "envs": dict(job.variables),
        "setup": job.options.get("setup"),
        "run": f"{configuration_file(job.configuration_for_restarts, '/tmp/shardkit.yaml')}\n{launch}\n",
    }
    how = "Start it with: sky jobs launch FILE, in the folder of the script, which is uploaded."
    return f"{head(job, how)}\n" + yaml_text({name: value for name, value in task.items() if value})


def accelerator(device: str) -> str:
    """SkyPilot's name for a device: `h100-80` -> `H100`."""
    return _GPUS.get(device) or device.split("-")[0].upper()
