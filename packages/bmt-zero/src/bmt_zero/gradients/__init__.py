"""Reduction of whole gradients: from the backward pass to each rank's part of the sum in ``.grad``."""
