"""What training will cost: by formula (without torch), by simulation on fake tensors (with torch), and the report.

a plan       request, answering, answer, notes; suggest, search; devices, optimizers, averages; measured, beside a run
by formula   rank_memory; closed_form, unit_sizes, whole_steps, activations, context, traffic, roofline,
             whole_run, failures; tpu
simulated    simulation, and in its child process worker, batches, simulated_optimizers, fake_world, training_step,
             memory_tracker, repeats; allocator
its text     report, json_answer, page, picture, plot, png
"""
