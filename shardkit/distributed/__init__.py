"""The ranks: who they are, how they agree, and operations on tensors that are spread over them."""
