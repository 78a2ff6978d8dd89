"""Makes a model parallel: units, sharding or replication, dtypes, and initial values."""
