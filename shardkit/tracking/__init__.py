"""Experiment tracking: built-in files, and trackers of installed packages."""
