"""What `shardkit doctor` tries: this machine, its network, and what its ranks reach together."""
