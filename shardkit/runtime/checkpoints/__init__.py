"""How a run saves and loads its checkpoints.

which, and when    checkpointing
a save, a load     beginning; saving, loading, resuming, save_session, separate_checkpoints; save_pretrained of other
                   libraries
what is in one     objects; hooks, state_hooks
"""
