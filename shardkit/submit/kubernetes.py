"""Shared parts of the engines on Kubernetes: the pod, the rules for exit codes, and objects as YAML."""

import re
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from shardkit.errors import EXIT_PREEMPTED
from shardkit.submit.job import Job, configuration_file, folded, head, memory_in_gib

PORT = 29500
"""Every pod has its own IP address, so all jobs can use the same port."""

CONTAINER = "node"
OPTIONS = {
    "namespace": "namespace of the objects",
    "queue": "Kueue's local queue",
    "priority-class": "priority class of the pods",
    "service-account": "service account of the pods",
    "env-secret": "a secret; each of its keys is an environment variable of the script",
    "gpu-resource": "resource name of the GPUs; default: nvidia.com/gpu",
}
OURS = re.compile(r"NNODES|MASTER_(ADDR|PORT)|JOB_COMPLETION_INDEX|PET_.*")
"""Variables by which the pods find each other."""
_LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"
LONGEST_NAME = 40
"""Names of pods are longer; their limit is 63."""


def problems(job: Job) -> list[str]:
    """Problems that the API would reject."""
    found = []
    if not re.fullmatch(_LABEL, job.name) or len(job.name) > LONGEST_NAME:
        found.append(
            f"--name: may only have lower-case letters, digits and dashes, must begin with a letter, and have at most "
            f"{LONGEST_NAME} characters (got {job.name!r}); give another name."
        )
    if job.image is None:
        found.append(
            "--image: a container image with the script and shardkit is missing (got none); add --image NAME:TAG."
        )
    found += [
        f"--env {name}: is set by the job, by which its pods find each other; remove it."
        for name in job.variables
        if OURS.fullmatch(name)
    ]
    return found


def resources(job: Job) -> dict[str, Any]:
    """Requests and limits of a machine's pod. GPUs and memory are also limits, cores are not."""
    limits: dict[str, Any] = {}
    if job.gpus_per_machine:
        limits[job.options.get("gpu-resource", "nvidia.com/gpu")] = job.gpus_per_machine
    if job.memory_bytes is not None:
        limits["memory"] = f"{memory_in_gib(job.memory_bytes)}Gi"
    return {"requests": {"cpu": job.cpus_per_machine, **limits}, **({"limits": limits} if limits else {})}


def command(job: Job) -> list[str]:
    """The container's command. Every $ is doubled, since Kubernetes expands $(NAME) in it, and turns $$ into $."""
    logs = ""
    if job.volumes:
        folder = shlex.quote(f"{job.volumes[0].path}/runs/{job.name}")
        logs = f'{folder}/"$(date +%Y%m%d-%H%M%S)-$JOB_COMPLETION_INDEX"'
    launch = job.launch_words("/tmp/shardkit.yaml", ["--logs", logs] if logs else [])
    # A cluster's own runtime (`kubeflow.OPTIONS`) has its own rules for restarts.
    text = job.configuration if "runtime" in job.options else job.configuration_for_restarts
    script = f"{configuration_file(text, '/tmp/shardkit.yaml')}\n{folded(['exec', *launch])}"
    return ["bash", "-c", script.replace("$", "$$") + "\n"]


def variables(environment: Mapping[str, str]) -> list[dict[str, str]]:
    """A container's variables. Kubernetes expands $(NAME) in them, and turns $$ into $."""
    return [{"name": name, "value": value.replace("$", "$$")} for name, value in environment.items()]


def batch_job(job: Job, environment: dict[str, str]) -> dict[str, Any]:
    """The Job's spec: one pod per machine. Exit code 75 of a pod means that it was preempted and has saved; the
    condition DisruptionTarget, that it was preempted, evicted or drained, and may not have saved in time."""
    preempted = {"containerName": CONTAINER, "operator": "In", "values": [EXIT_PREEMPTED]}
    return {
        "parallelism": job.machines,
        "completions": job.machines,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": preempted},
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget"}]},
            ]
        },
        "template": {"spec": _pod(job, environment)},
    }


def _pod(job: Job, environment: dict[str, str]) -> dict[str, Any]:
    # NCCL and data loaders need more shared memory than the usual 64 MiB.
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    for number, volume in enumerate(job.volumes):
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": volume.source}})
        mounts.append({"name": f"volume-{number}", "mountPath": volume.path})
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": job.image,
        "command": command(job),
        "env": variables(environment),
        "envFrom": [{"secretRef": {"name": job.options["env-secret"]}}] if "env-secret" in job.options else [],
        "resources": resources(job),
        "volumeMounts": mounts,
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_s,
        "containers": [{name: value for name, value in container.items() if value != []}],
        "volumes": volumes,
    }
    for option, key in (("priority-class", "priorityClassName"), ("service-account", "serviceAccountName")):
        if option in job.options:
            pod[key] = job.options[option]
    return pod


def failure_policy(job: Job) -> dict[str, Any]:
    """Restart all pods: always after a preemption, `max_restarts` times after failures, and not after the end of their
    time, which each restart would begin anew."""
    rules = [
        {
            "name": "preempted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
    ]
    if job.time_s is not None:
        rules.append({"name": "time", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]})
    return {"maxRestarts": job.config.shardkit.launch.max_restarts, "rules": rules}


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
    return head(job, "Create it with: kubectl create -f FILE") + "\n" + "---\n".join(yaml_text(one) for one in objects)


def yaml_text(value: dict[str, Any]) -> str:
    """YAML in the order of the value, with multi-line strings as block scalars."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as block scalars, indents lists below their key, and uses no aliases."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
