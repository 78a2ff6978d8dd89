"""Ranks and their process group: startup, agreement, and collectives on tensors."""
