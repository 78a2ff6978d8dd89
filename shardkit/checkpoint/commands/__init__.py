"""Commands on checkpoints that need no run. (verify: `checkpoint/files`.)

ours          compare, merge
others'       convert, dcp, foreign_files, foreign_optimizers
"""
