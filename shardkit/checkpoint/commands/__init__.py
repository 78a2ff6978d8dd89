"""What the commands of `shardkit checkpoint` do, without a run; their flags: `cli/checkpoint.py`. (list, verify and
pin use `loading/locate`, `files/verify` and `saving/retention`.)

ours          compare, describe, merge, prune
others'       convert; dcp, foreign_files, foreign_optimizers, zero
"""
