"""Distributed parameters: which part each rank holds, and how their gradients are summed."""
