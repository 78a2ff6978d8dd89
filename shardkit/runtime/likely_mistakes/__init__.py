"""Mistakes of scripts that would train something else without a word: each is told, or refused.

What is checked before a step is in `Run.checks_before_step`.

steps              early_steps, steps_and_windows, learning_rates, schedule_lengths
left out           left_out, missing_models, followers
in two models      shared_parameters
between ranks      same_batches, same_data, same_modules, same_weights, evaluations, whole_sequences, losses_of_slices
"""
