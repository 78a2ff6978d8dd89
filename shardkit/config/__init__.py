"""The configuration of a run: from files, the environment and flags to a checked Config.

what can be said    schema; keys, its names; descriptions, its texts
files               files (find, read, write); document (YAML), yaml_text, edit, json_schema
one from several    layers, validation; hardware_defaults; code, for settings in a script; command, for `--set`
what must agree     checks, without_effect, findings; xla, for TPUs
what follows        meaning
of Accelerate       accelerate_keys
what is found here  hardware, other_devices; scheduler, tasks, starters
addresses           host_port
the docs page       reference
"""
