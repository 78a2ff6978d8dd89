"""A run of a script on one rank: prepare, loops, saves, stops. `accelerator` is its face, `run` its state.

settings           settings, settings_objects, project, unsupported
what is shown      state, topology, summary, logger
prepare            prepare, distributed_model, forwarding, eager, optimizer, lr_scheduler
a training step    training_step, accumulate, window_data, step_events, deferred_gradients, optimizer_turns,
                   foreign_steps, counters
between steps      boundaries, step_boundary, preemption
saves and loads    checkpointing, saving, loading, save_session, separate_checkpoints, objects; hooks, state_hooks
other ranks        communication, process_control
likely mistakes    early_steps, followers, learning_rates, left_out, missing_models, same_data, same_modules,
                   same_weights
measured           measure, profiling, speed
other ways in      fsdp, notebook, batch_size
"""
