"""Configuration files of other tools -> Config, and back, with a report on every key."""
