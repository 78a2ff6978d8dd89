"""Data for many ranks: one order for all, a position in it that survives restarts."""
