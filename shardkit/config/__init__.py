"""The configuration: schema (what can be said), checks (what must agree), files (YAML <-> Config)."""
