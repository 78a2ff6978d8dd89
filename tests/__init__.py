"""The tests. `docs/contributing.md` has their four levels; what they share is here, by level:

on ranks         ranks, the pool of them; agreement
what is trained  training, models, loaders, random_models; engine, without an Accelerator; the folder loops, as people
                 write them; to be continued: numbered_runs, checkpoints
launched         launches; forked, ranks that die; elastic_runs; what runs: accelerator_script, the folder scripts
the wizard       wizard_talk, with keys from a pipe; wizard_screen, in a terminal
around a run     network, slurm_cluster, stores of objects, openreg, a device of an extension
what is printed  printed
files            the folder data; golden, checkpoints of releases
"""
