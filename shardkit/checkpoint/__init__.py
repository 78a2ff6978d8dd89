"""Saved training states: written completely or not at all, and loaded on any number of ranks.

a save     write, opening, put, attempt, commit; save_request, async_save, lock, retention, additions, in_store;
           shared_storage, before training
a load     read, locate, seen, load_plan, kinds, fill, spread_weights, differences
the state  state, optimizers, optimizer_groups, numbered, per_rank, replicas, ties, tensors;
           plain values: shardkit/values.py
the files  layout, manifest, index_json, state_json, digest, folder, disk, paths, access   (no torch)
a model    save_model, export, export_to_store, exported_parts
commands   verify, compare, merge, convert, with dcp, foreign_files and foreign_optimizers for the formats of others
tests      faults
"""
