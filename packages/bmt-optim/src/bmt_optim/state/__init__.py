"""Optimizer state for checkpoints: whole tensors by parameter name, or the parts of one rank."""
