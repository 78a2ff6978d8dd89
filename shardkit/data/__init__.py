"""Data loading over ranks: one global order, and a position in it that survives restarts.

loader          the prepared loader that a script iterates: batches, position, end of epoch
skipping        starts an epoch after its first batches
sources         where batches come from: a dataset by samples, by a batch sampler, or a stream
sampler         an epoch's order and each rank's share of it
stream          iterable datasets
first_items     whether all ranks read the same
private_random  random generators of the data alone
workers         DataLoader workers
device          moves batches to the device
"""
