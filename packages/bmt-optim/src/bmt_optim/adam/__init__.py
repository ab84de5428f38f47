"""Adam: the optimizer, the order of its updates, and its state."""
