"""What a run does in a training step, and between two steps.

a training step    training_step, accumulate, window_data, step_events, deferred_gradients, optimizer_turns,
                   foreign_steps, counters
between steps      boundaries, step_boundary, preemption
"""
