"""The command line: one short file a command; each imports what it needs when it runs."""
