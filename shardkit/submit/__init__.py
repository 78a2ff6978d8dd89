"""Makes jobs for SLURM, Kubeflow, JobSet, SkyPilot, Ray Train or ssh from a configuration and a script.

from flags to a job  making, reading, sizing; job, the same for all engines
a job's file         engines, the table; slurm, kubeflow, jobset, skypilot, ray_train, ssh; kubernetes, shared by two
checked or started   sending
"""
