"""A load: which checkpoint, what each rank reads of it, and into what.

which         locate, seen
what          load_plan, kinds
one load      read, spread_weights
"""
