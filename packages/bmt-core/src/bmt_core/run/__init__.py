"""One run, from start to shutdown: the grid of ranks, collectives, lanes, random numbers."""
