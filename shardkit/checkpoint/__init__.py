"""Saved training states: written completely or not at all, and loaded on any number of ranks.

Each folder uses those above it:

files         what a checkpoint consists of, and whether it is whole   (no torch)
states        the state that is saved: models, optimizers, what differs between ranks
saving        a save
loading       a load
exporting     a model for others to load
commands      what those of `shardkit checkpoint` do; the formats of others

tests         faults
"""
