"""Adam: the optimizer, the order of its updates, and the state it keeps."""
