"""What Kubernetes' engines share: the pod, the rules for exit codes, and objects as YAML."""

import re
import shlex
from typing import Any

import yaml

from shardkit.errors import EXIT_PREEMPTED
from shardkit.submit.job import Job, configuration_file, folded, head, memory_in_gib

PORT = 29500
"""Every pod has an address of its own, so all jobs may use one port."""

CONTAINER = "node"
OPTIONS = {
    "namespace": "namespace of the objects",
    "queue": "Kueue's local queue",
    "priority-class": "priority class of the pods",
    "service-account": "service account of the pods",
    "gpu-resource": "name of the GPUs among a machine's resources; by default nvidia.com/gpu",
}
_LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"


def problems(job: Job) -> list[str]:
    """What the API would refuse."""
    found = []
    if not re.fullmatch(_LABEL, job.name) or len(job.name) > 40:  # pods' names are longer, and end at 63
        found.append(
            f"--name: is made of small letters, digits and dashes, begins with a letter, and has at most 40 of them "
            f"(got {job.name!r}); give another --name."
        )
    if job.image is None:
        found.append("--image: which container image? It must hold the script and shardkit; add --image NAME:TAG.")
    return found


def resources(job: Job) -> dict[str, Any]:
    """Requests and limits of a machine's pod. GPUs, and memory, are limits too; cores are not."""
    limits: dict[str, Any] = {}
    if job.gpus_per_machine:
        limits[job.options.get("gpu-resource", "nvidia.com/gpu")] = job.gpus_per_machine
    if job.memory_bytes is not None:
        limits["memory"] = f"{memory_in_gib(job.memory_bytes)}Gi"
    return {"requests": {"cpu": job.cpus_per_machine, **limits}, **({"limits": limits} if limits else {})}


def command(job: Job) -> list[str]:
    """The container's command. Kubernetes reads $(NAME) in it, and $$ as one $: so every $ is doubled."""
    logs = ""
    if job.volumes:
        folder = shlex.quote(f"{job.volumes[0].path}/runs/{job.name}")
        logs = f'{folder}/"$(date +%Y%m%d-%H%M%S)-$JOB_COMPLETION_INDEX"'
    launch = job.launch_words("/tmp/shardkit.yaml", ["--logs", logs] if logs else [])
    script = f"{configuration_file(job.configuration, '/tmp/shardkit.yaml')}\n{folded(['exec', *launch])}"
    return ["bash", "-c", script.replace("$", "$$") + "\n"]


def batch_job(job: Job, environment: dict[str, str]) -> dict[str, Any]:
    """The Job's spec: a pod for each machine, by number; a pod that ends with 75 was told to stop, and saved."""
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": job.image,
        "command": command(job),
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "resources": resources(job),
        "volumeMounts": [
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            *({"name": f"volume-{number}", "mountPath": volume.path} for number, volume in enumerate(job.volumes)),
        ],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_s,
        "containers": [{name: value for name, value in container.items() if value != []}],
        "volumes": [
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},  # NCCL and data loaders need more than 64 MiB
            *(
                {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": volume.source}}
                for number, volume in enumerate(job.volumes)
            ),
        ],
    }
    for option, key in (("priority-class", "priorityClassName"), ("service-account", "serviceAccountName")):
        if option in job.options:
            pod[key] = job.options[option]
    return {
        "parallelism": job.machines,
        "completions": job.machines,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [EXIT_PREEMPTED]},
                }
            ]
        },
        "template": {"spec": pod},
    }


def failure_policy(job: Job) -> dict[str, Any]:
    """All pods start again: after a preemption always, after a failure as often as the configuration restarts."""
    return {
        "maxRestarts": job.config.shardkit.launch.max_restarts,
        "rules": [
            {
                "name": "preempted",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
            }
        ],
    }


def metadata(job: Job) -> dict[str, Any]:
    """Name, namespace and queue of an object."""
    found: dict[str, Any] = {"name": job.name}
    if "namespace" in job.options:
        found["namespace"] = job.options["namespace"]
    if "queue" in job.options:
        found["labels"] = {"kueue.x-k8s.io/queue-name": job.options["queue"]}
    return found


def manifest(job: Job, objects: list[dict[str, Any]]) -> str:
    """The objects as one YAML file."""
    top = "".join(f"# {line}\n" for line in head(job, "Create it with: kubectl create -f FILE"))
    return top + "---\n".join(yaml_text(one) for one in objects)


def yaml_text(value: dict[str, Any]) -> str:
    """YAML in the order of the value, scripts as blocks of lines."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Texts of several lines stay readable; lists are indented below their key, and nothing is an alias."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
