"""From the whole gradients of one backward pass to the sum over ranks in ``.grad``."""
