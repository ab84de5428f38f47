"""The run of a Block: its calls, gathers ahead of them, and recomputation in backward."""
