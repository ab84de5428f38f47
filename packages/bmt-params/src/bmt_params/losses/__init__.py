"""Losses over a whole or a tensor-parallel vocabulary."""
