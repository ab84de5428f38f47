"""Initial values, the same for every number of ranks."""
