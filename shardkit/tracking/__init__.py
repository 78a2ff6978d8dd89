"""Where a run's numbers go: files of its own, and the trackers that are installed."""
