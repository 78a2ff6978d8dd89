"""Other tools' configuration files -> Config, and back, with a report of every key."""
