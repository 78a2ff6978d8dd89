"""What `shardkit doctor` tries: this machine, its network, and what its ranks reach together.

tried           examining, all of it in order; machine; ranks
found           findings
"""
