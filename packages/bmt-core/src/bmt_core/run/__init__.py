"""A run, from ``init_distributed()`` to ``shutdown()``: the grid of ranks, collectives, lanes,
random numbers.
"""
