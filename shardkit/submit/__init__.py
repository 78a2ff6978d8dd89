"""A configuration and a script as a job of an engine: SLURM, Kubeflow, JobSet, SkyPilot, Ray Train, or ssh."""
