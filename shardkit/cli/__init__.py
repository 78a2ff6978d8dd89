"""The command line: one file per command; each imports what it needs when it runs.

commands      main; checkpoint, completion, config, doctor, env, launch, migrate, plan, submit
their work    configuring, launching
their texts   checkpoint_text, config_text, progress; advice, for errors of the system
their flags   options; habits, what other tools call them
"""

HELP = {"help_option_names": ["-h", "--help"]}
"""Context settings of every command: -h is --help."""
