"""Kubeflow Trainer (trainer.kubeflow.org/v1alpha1): a TrainJob, and the TrainingRuntime that it runs in.

The cluster's own torch-distributed runtime says nothing of exit codes, so the job brings one that does.
"""

from dataclasses import replace
from typing import Any

from shardkit.submit import jobset, kubernetes
from shardkit.submit.job import Job

API = "trainer.kubeflow.org/v1alpha1"
OPTIONS = {"runtime": "a ClusterTrainingRuntime to use instead of the job's own, e.g. torch-distributed"}


def problems(job: Job) -> list[str]:
    """What the API would refuse."""
    found = kubernetes.problems(job)
    given = [name for name in ("priority-class", "service-account") if name in job.options]
    if "runtime" in job.options:
        given += ["--volume"] if job.volumes else []
        found += [
            f"--option runtime: what the cluster's runtime says of pods holds (got {name} too); leave one out."
            for name in given
        ]
    return found


def render(job: Job) -> str:
    """Both objects. The trainer gives each pod PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT."""
    runtime = job.options.get("runtime")
    reference = (
        {"name": runtime} if runtime else {"apiGroup": API.split("/")[0], "kind": "TrainingRuntime", "name": job.name}
    )
    spec: dict[str, Any] = {
        "runtimeRef": reference,
        "trainer": {
            "image": job.image,
            "command": kubernetes.command(job),
            "numNodes": job.machines,
            "numProcPerNode": job.ranks_per_machine,
            "resourcesPerNode": kubernetes.resources(job),
        },
    }
    if job.time_s is not None:
        spec["activeDeadlineSeconds"] = job.time_s
    train_job = {"apiVersion": API, "kind": "TrainJob", "metadata": kubernetes.metadata(job), "spec": spec}
    return kubernetes.manifest(job, [train_job] if runtime else [_runtime(job), train_job])


def _runtime(job: Job) -> dict[str, Any]:
    """What the job says itself (command, resources) is left to it; the runtime says what becomes of pods that end."""
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    spec = jobset.spec(replace(job, time_s=None), {}, labels)  # the TrainJob has the time
    [container] = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    for name in ("command", "resources"):
        del container[name]
    metadata = {name: value for name, value in kubernetes.metadata(job).items() if name != "labels"}
    return {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": metadata,
        "spec": {
            "mlPolicy": {"numNodes": job.machines, "torch": {"numProcPerNode": job.ranks_per_machine}},
            "template": {"spec": spec},
        },
    }
