"""A model made parallel: how it is cut, sharded or replicated, its dtypes, and where its first values come from."""
