"""A run of a script on one rank: prepare, loops, saves, stops. `accelerator` is its face, `run` its state.

settings           settings, settings_objects, project, unsupported
what is shown      state, topology, summary, logger
prepare            prepare, distributed_model, forwarding, eager, optimizer, lr_scheduler
training steps     the folder steps
saves and loads    the folder checkpoints
likely mistakes    the folder likely_mistakes; under debug: nan_origin
other ranks        communication, process_control
measured           measure, profiling, speed
the end            ending
other ways in      fsdp, notebook, batch_size
"""
