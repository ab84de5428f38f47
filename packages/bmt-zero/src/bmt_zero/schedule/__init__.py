"""When things happen: one call of a Block, what is gathered ahead of it, and what is computed again in backward."""
