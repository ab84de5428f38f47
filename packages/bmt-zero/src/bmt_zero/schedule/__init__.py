"""How Blocks run: their calls, the gathers ahead of them, and recomputation in backward."""
