"""The command line: one short file a command; each imports what it needs when it runs."""

HELP = {"help_option_names": ["-h", "--help"]}
"""Of every command: -h is --help."""
