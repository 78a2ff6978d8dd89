"""The command line: one file per command; each imports what it needs when it runs."""

HELP = {"help_option_names": ["-h", "--help"]}
"""Context settings of every command: -h is --help."""
