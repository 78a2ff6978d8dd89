"""Experiment tracking.

of a run        trackers: which there are, by name; which of them a run has
each of them    tracker, the base class; records, in files; installed, of other packages
"""
