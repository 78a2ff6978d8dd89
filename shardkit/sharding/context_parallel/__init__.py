"""Context parallelism: the ranks of a context group share each sequence, one slice each.

the ranks           groups
a loop's region     region: sequences are split, and whole again at its end
inside of it        torch_functions: those that ask for it; attention, losses: what they do; transformers_masks
models' forwards    forwards: what they are given beside; first_forward: that slices give what whole sequences give
"""
