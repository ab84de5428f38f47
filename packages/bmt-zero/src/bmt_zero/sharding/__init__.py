"""Where parameters lie: the flat layout, each rank's shard of it, and the memory of the whole while it is gathered."""
