"""JobSet (jobset.x-k8s.io/v1alpha2): one indexed Job with one pod per machine, restarted as a whole."""

from typing import Any

from shardkit.submit import kubernetes
from shardkit.submit.job import Job

GROUP = "node"
"""The name of the only replicated Job."""


def render(job: Job) -> str:
    """The JobSet. Pods get their number from JOB_COMPLETION_INDEX, and the address of pod 0 from its DNS name."""
    environment = {
        "NNODES": str(job.machines),
        "MASTER_ADDR": f"{job.name}-{GROUP}-0-0.{job.name}",
        "MASTER_PORT": str(kubernetes.PORT),
        **job.variables,
    }
    found = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": kubernetes.metadata(job),
        "spec": spec(job, environment),
    }
    return kubernetes.manifest(job, [found])


def spec(job: Job, environment: dict[str, str], labels: dict[str, str] | None = None) -> dict[str, Any]:
    """The JobSet's spec. `labels`: labels of the Job's template."""
    template: dict[str, Any] = {"spec": kubernetes.batch_job(job, environment)}
    if job.time_s is not None:
        template["spec"]["activeDeadlineSeconds"] = job.time_s
    if labels:
        template = {"metadata": {"labels": labels}, **template}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": kubernetes.failure_policy(job),
        "replicatedJobs": [{"name": GROUP, "replicas": 1, "template": template}],
    }
