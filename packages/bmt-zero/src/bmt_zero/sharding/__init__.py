"""Memory of parameters: the flat layout, each rank's shard, and the buffer that holds gathered parameters."""
