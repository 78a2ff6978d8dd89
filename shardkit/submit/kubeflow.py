"""Kubeflow Trainer (trainer.kubeflow.org/v1alpha1): a TrainJob, and the TrainingRuntime that it uses.

The cluster's torch-distributed runtime has no rules for exit codes, so the job contains a runtime with such rules.
"""

from dataclasses import replace
from typing import Any

from shardkit.submit import jobset, kubernetes
from shardkit.submit.job import Job

API = "trainer.kubeflow.org/v1alpha1"
OPTIONS = {"runtime": "a ClusterTrainingRuntime to use instead of the one in the job, e.g. torch-distributed"}


def problems(job: Job) -> list[str]:
    """Problems that the API would reject."""
    found = kubernetes.problems(job)
    given = [name for name in ("priority-class", "service-account", "env-secret") if name in job.options]
    if "runtime" in job.options:
        given += ["--volume"] if job.volumes else []
        found += [
            f"--option runtime: the cluster's runtime defines the pods (got {name}, too); remove one of them."
            for name in given
        ]
    return found


def render(job: Job) -> str:
    """Both objects. The trainer sets PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT in each pod."""
    runtime = job.options.get("runtime")
    reference = (
        {"name": runtime} if runtime else {"apiGroup": API.split("/")[0], "kind": "TrainingRuntime", "name": job.name}
    )
    spec: dict[str, Any] = {
        "runtimeRef": reference,
        "trainer": {
            "image": job.image,
            "command": kubernetes.command(job),
            **({"env": kubernetes.variables(job.variables)} if job.variables else {}),
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
    """The runtime. It defines what happens when pods end; command and resources come from the TrainJob."""
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    spec = jobset.spec(replace(job, time_s=None), {}, labels)  # the TrainJob has the time limit
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
