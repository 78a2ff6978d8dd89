"""Models replicated by DistributedDataParallel: in any loop their gradients are the mean over all ranks.

a model         replicate
torch's DDP     replica, beyond what it supports; comm_hooks, which compress gradients
what it leaves  names, with its prefix; bucket_views, the gradients
"""
