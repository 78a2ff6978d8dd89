"""Makes jobs for SLURM, Kubeflow, JobSet, SkyPilot, Ray Train or ssh from a configuration and a script."""
