"""Data loading over ranks: one global order, and a position in it that survives restarts.

preparing       makes a prepared loader of the user's
loader          the prepared loader that a script iterates: batches, position, end of epoch
loop            one iteration over it
agreement       what ranks agree on when a loader is prepared
sources         where batches come from: a dataset by samples, by a batch sampler, or a stream
sampler         an epoch's order; a random one is computed by permutation
shares          each rank's part of a global batch
position        a place in the data, and whether a saved one is valid
skipping        starts an epoch after its first batches
stream          iterable datasets; those of Hugging Face: hugging_face
stream_state    the own state of a dataset that loops share
first_items     whether all ranks read the same
padding         real samples of a padded batch
private_random  random generators of the data alone
workers         DataLoader workers
device          moves batches to the device
"""
