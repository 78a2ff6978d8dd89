"""`shardkit config`: questions as data, a loop that asks them, review and save."""
