"""What training will cost: closed form (no torch), simulation on fake tensors (torch), report."""
