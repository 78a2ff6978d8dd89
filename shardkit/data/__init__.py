"""Data for many ranks: one order for all, a position in it that survives restarts.

loader          what a script iterates: batches, position, the end in time
sources         where batches come from: a dataset by samples, by a batch sampler, or a stream
sampler         an epoch's order and each rank's share of it
stream          iterable datasets
private_random  random numbers that belong to the data
workers         DataLoader workers
device          batches onto the device
"""
