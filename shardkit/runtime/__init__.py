"""A run of a script on one rank: prepare, loops, saves, stops. `accelerator` is its face, `run` its state."""
